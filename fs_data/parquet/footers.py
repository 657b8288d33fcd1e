"""What the footers tell before a row is read: row groups, their size in memory, types, and a checksum of each file."""

import hashlib
import io
import json
import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from fs_data.parquet.bounded import Deadline
from fs_data.parquet.convert import Vocabulary, output_names, why_not
from fs_data.parquet.errors import ParquetError, StorageError
from fs_data.parquet.files import Attempt, File
from fs_data.parquet.where import Bounds, Term, can_match, check_types, columns_of

_WIDTHS = {"INT64": 8, "DOUBLE": 8, "INT32": 4, "FLOAT": 4, "BOOLEAN": 1, "INT96": 12, "FIXED_LEN_BYTE_ARRAY": 32}
_WIDEST = 8  # in a batch; a text becomes its place in the vocabulary
_BUFFERS = 1 << 16  # of a column, whatever it holds


@dataclass(frozen=True, slots=True)
class RowGroup:
    file: int
    """Its place in `Footers.files`."""
    index: int
    """Within its file."""
    num_rows: int
    num_bytes: int
    """Of the columns that are read, once decoded: at most."""
    decoding_bytes: int
    """Most memory while they are decoded, they included."""


@dataclass(frozen=True, slots=True)
class Footers:
    files: tuple[File, ...]
    checksums: tuple[str, ...]
    """Of each file's footer: a state saved for other files is refused."""
    groups: tuple[RowGroup, ...]
    """All that can hold matching rows, in order."""
    outputs: tuple[str, ...]
    """The batch's columns."""
    types: dict[str, Any]
    """Arrow type of each parquet column that is read; from the first file that knows it."""
    partitions: dict[str, Any]
    """Arrow type of each column that directories' names give."""
    skipped_files: tuple[str, ...]
    """What was wrong with each file that was left out."""


@dataclass(frozen=True, slots=True)
class _Footer:
    schema: Any
    metadata: Any
    checksum: str


def checksum(metadata: Any) -> str:
    """8 hex digits of a footer, which holds the pages' places and sizes, and columns' bounds."""
    sink = io.BytesIO()
    metadata.write_metadata_file(sink)
    return hashlib.blake2b(sink.getbuffer(), digest_size=4).hexdigest()


def read_footers(
    files: Sequence[File],
    columns: Sequence[str] | None,
    known_types: Mapping[str, Any],
    *,
    where: Sequence[Sequence[Term]],
    vocabularies: Mapping[str, Vocabulary],
    attempt: Attempt,
    skip: bool,
) -> Footers:
    """All files' footers, several at a time.

    Args:
        known_types: Of columns that other sources have as well.
        columns: Names of the batch's columns, or of parquet columns with several of them; None takes all.
        attempt: Runs an access to storage, given its place, with retries.
        skip: Leaves out files that do not fit, in place of an error; not those that storage failed to give.

    Raises:
        ParquetError: A broken file, a missing column, a type that differs from the other files' or has no tensor.
        ValueError: A predicate that does not fit the type of its column.
    """
    partitions = _partition_types(files)
    given = {k for part in where for k, _, _ in part}
    files = [f for f in files if can_match(where, _partition_bounds(f, partitions))] if where else list(files)

    def read(file: File) -> _Footer | ParquetError:
        def access(deadline: Deadline) -> _Footer:
            with file.open(deadline) as opened:
                return _Footer(opened.schema_arrow, opened.metadata, checksum(opened.metadata))

        try:
            return attempt(file.path, file.is_local, access)
        except ParquetError as error:
            # Other readers may have got the footer: they would take this one's rows for those of the other files.
            if not skip or isinstance(error, StorageError):
                raise
            return error

    with ThreadPoolExecutor(min(16, max(1, len(files)))) as pool:
        footers = list(pool.map(read, files))

    types = dict(known_types)
    wanted: list[str] | None = list(columns) if columns is not None else None
    kept: list[tuple[File, _Footer]] = []
    faults: list[str] = []
    for file, footer in zip(files, footers, strict=True):
        fault = str(footer) if isinstance(footer, ParquetError) else None
        if not isinstance(footer, ParquetError):
            available = {**{f.name: f.type for f in footer.schema}, **partitions}
            if wanted is None:
                wanted = [n for n, kind in available.items() if n not in partitions or not pa.types.is_string(kind)]
            names = _parquet_names(wanted, available)
            needed = [*names.values(), *given]
            fault = _repeated(file.path, footer.schema.names)
            fault = fault or _misfit(file.path, wanted, names, needed, available, types, vocabularies)
            if fault is None:
                fault = _contradiction(file, footer, needed)
            if fault is None:
                kept.append((file, footer))
                for n in needed:
                    if n not in types or _is_unknown(types[n]):
                        types[n] = available[n]
        if fault is not None:
            if not skip:
                raise ParquetError(fault)
            faults.append(fault)
    if not kept and faults:
        raise ParquetError(f"at least one file must be readable, none is; the first: {faults[0]}")

    if kept:
        check_types(where, types)
    read_types = {n: kind for n, kind in types.items() if n not in partitions}
    longest = _longest_texts(types, vocabularies)
    groups = [g for i, (file, footer) in enumerate(kept) for g in _groups(i, file, footer, where, types, longest)]
    outputs = [out for n in wanted or () for out in _outputs(n, types)]
    return Footers(
        files=tuple(file for file, _ in kept),
        checksums=tuple(footer.checksum for _, footer in kept),
        groups=tuple(groups),
        outputs=tuple(outputs),
        types=read_types,
        partitions={n: kind for n, kind in partitions.items() if n in types},
        skipped_files=tuple(faults),
    )


def _groups(
    i: int,
    file: File,
    footer: _Footer,
    where: Sequence[Sequence[Term]],
    types: Mapping[str, Any],
    longest: Mapping[str, int],
) -> Iterator[RowGroup]:
    by_partition = _partition_bounds(file, {n: types[n] for n, _ in file.partitions if n in types})
    filtered = set(columns_of(where))
    for g in range(footer.metadata.num_row_groups):
        group = footer.metadata.row_group(g)
        bounds: dict[str, Bounds] = {}
        num_bytes = decoding_bytes = 8 * (group.num_rows + 1) * len(types)
        for name, column, chunk in _chunks(footer, group, types):
            if chunk.physical_type in _WIDTHS:
                of_values = _WIDTHS[chunk.physical_type] * chunk.num_values
                num_bytes += min(of_values, _WIDEST * chunk.num_values)
            else:  # texts, which the file's dictionary may hold once each
                of_values = max(chunk.total_uncompressed_size, longest.get(name, 0) * chunk.num_values)
                num_bytes += _WIDEST * chunk.num_values
                # Offsets of the texts, and the places as they are looked up, then widened.
                decoding_bytes += _grown(4 * chunk.num_values) + (4 + _WIDEST) * chunk.num_values
            # The file's bytes, a page of them decompressed, and buffers that grow by doubling: for values, and for two
            # levels of 16 bits that say where lists begin.
            decoding_bytes += _BUFFERS + chunk.total_compressed_size + chunk.total_uncompressed_size
            decoding_bytes += _grown(of_values) + 2 * _grown(2 * chunk.num_values)
            decoding_bytes += of_values if _may_convert(column) else 0
            known = _bounds(chunk) if name in filtered else None
            if known is not None:
                bounds[name] = known
        if not where or can_match(where, {**bounds, **by_partition}):
            yield RowGroup(i, g, group.num_rows, num_bytes, decoding_bytes)


def _longest_texts(types: Mapping[str, Any], vocabularies: Mapping[str, Vocabulary]) -> dict[str, int]:
    """Bytes of the longest text that each parquet column may hold."""
    longest: dict[str, int] = {}
    for name, kind in types.items():
        texts = [text for out in output_names(kind, name) for text in vocabularies.get(out, ())]
        longest[name] = max((len(text.encode()) for text in texts), default=0)
    return longest


def _may_convert(column: Any) -> bool:
    """Whether Arrow makes values of another width, beside those that it decodes."""
    logical = json.loads(column.logical_type.to_json())
    return logical["Type"] in ("Date", "Decimal") or logical.get("bitWidth", 32) < 32


def _grown(num_bytes: int) -> int:
    return 1 << num_bytes.bit_length()


def _chunks(footer: _Footer, group: Any, names: Collection[str]) -> Iterator[tuple[str, Any, Any]]:
    """`(name, its column in parquet's schema, chunk)` of a row group for the columns `names`; several for a struct."""
    for c in range(group.num_columns):
        chunk = group.column(c)
        path = chunk.path_in_schema
        name = path if path in footer.schema.names else path.partition(".")[0]
        if name in names:
            yield name, footer.metadata.schema.column(c), chunk


def _bounds(chunk: Any) -> Bounds | None:
    stats = chunk.statistics if chunk.is_stats_set else None
    if stats is None or not stats.has_min_max:
        return None
    return Bounds(stats.min, stats.max, not stats.has_null_count or stats.null_count > 0)


def _contradiction(file: File, footer: _Footer, needed: Sequence[str]) -> str | None:
    """A column whose values are not, by the footer, those that the name of the file's folder gives."""
    both = {name: value for name, value in file.partitions if name in needed and name in footer.schema.names}
    groups = (footer.metadata.row_group(g) for g in range(footer.metadata.num_row_groups if both else 0))
    for g, group in enumerate(groups):
        for name, _, chunk in _chunks(footer, group, both if group.num_rows else ()):
            bounds = _bounds(chunk)
            if bounds is None or bounds.has_nulls or {str(bounds.least), str(bounds.most)} != {both[name]}:
                return (
                    f"{file.path}, row group {g}, column {name!r}: must hold {both[name]} alone, as the name of the "
                    f"folder says, with bounds in the footer that tell, got {bounds}; rename the folder, or the column"
                )
    return None


def _parquet_names(wanted: Sequence[str], available: Mapping[str, Any]) -> dict[str, str]:
    """The parquet column that holds each wanted one; one that is nowhere is left out."""
    owners = {out: n for n, kind in available.items() for out in output_names(kind, n)}
    return {w: w if w in available else owners[w] for w in wanted if w in available or w in owners}


def _outputs(wanted: str, types: Mapping[str, Any]) -> list[str]:
    return output_names(types[wanted], wanted) if wanted in types else [wanted]


def _repeated(path: str, names: Sequence[str]) -> str | None:
    repeated = [name for name, times in Counter(names).items() if times > 1]
    return f"{path} must have each column once, it has several {repeated}; rename them" if repeated else None


def _misfit(
    path: str,
    wanted: Sequence[str],
    names: Mapping[str, str],
    needed: Sequence[str],
    available: Mapping[str, Any],
    types: Mapping[str, Any],
    vocabularies: Mapping[str, Vocabulary],
) -> str | None:
    if missing := [n for n in (*wanted, *needed) if n not in names and n not in available]:
        return f"{path} must have the columns {list(dict.fromkeys(missing))}, it has {list(available)}"
    for n in dict.fromkeys(names.values()):
        if reason := why_not(available[n], n, vocabularies):
            return f"{path}, column {n!r}: {reason}; got {available[n]}; or leave it out by columns=[…]"
    for n in needed:
        known, here = types.get(n), available[n]
        if known is not None and not known.equals(here) and not _is_unknown(known) and not _is_unknown(here):
            return f"{path}, column {n!r}: must be {known} as in the files before, got {here}; rewrite one of them"
    return None


def _is_unknown(kind: Any) -> bool:
    """Columns of nothing but nulls or empty lists are written without the type of what they never held."""
    return pa.types.is_null(kind) or (hasattr(kind, "value_type") and pa.types.is_null(kind.value_type))


def _partition_types(files: Sequence[File]) -> dict[str, Any]:
    values: dict[str, list[str]] = {}
    for file in files:
        for key, value in file.partitions:
            values.setdefault(key, []).append(value)
    whole = {k: all(map(_is_int64, vs)) for k, vs in values.items() if len(vs) == len(files)}
    return {k: pa.int64() if is_whole else pa.string() for k, is_whole in whole.items()}


def _is_int64(text: str) -> bool:
    return re.fullmatch(r"-?[0-9]{1,19}", text) is not None and -(2**63) <= int(text) < 2**63


def partition_value(file: File, name: str, kind: Any) -> int | str:
    value = dict(file.partitions)[name]
    return int(value) if pa.types.is_integer(kind) else value


def _partition_bounds(file: File, types: Mapping[str, Any]) -> dict[str, Bounds]:
    values = {n: partition_value(file, n, kind) for n, kind in types.items() if n in dict(file.partitions)}
    return {n: Bounds(v, v, False) for n, v in values.items()}
