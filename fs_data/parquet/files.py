"""The files behind a source: their row groups and columns, read once from the footers."""

import glob
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from fs_data.parquet.errors import ParquetError


@dataclass(frozen=True, slots=True)
class RowGroup:
    path: str
    index: int
    """Within its file."""
    num_rows: int


@dataclass(frozen=True, slots=True)
class Footers:
    groups: tuple[RowGroup, ...]
    columns: tuple[str, ...]
    checksum: str
    """Changes with the files' sizes, rows and groups: a state saved for other files is refused."""


def find_files(source: str | Path | Sequence[str | Path]) -> list[str]:
    """Local paths, sorted: a file, a directory's `*.parquet`, a glob, or a sequence of these.

    Raises:
        FileNotFoundError: Nothing there; the text names the source.
    """
    if not isinstance(source, (str, Path)):
        return [path for part in source for path in find_files(part)]
    path = Path(source)
    if path.is_dir():
        found = sorted(str(p) for p in path.rglob("*.parquet"))
    elif path.is_file():
        found = [str(path)]
    else:
        found = sorted(glob.glob(str(source), recursive=True))
    if not found:
        raise FileNotFoundError(
            f"histories must be a parquet file, a folder of them or a glob: nothing found at {source}"
        )
    return found


def read_footers(paths: Sequence[str], columns: Sequence[str] | None) -> Footers:
    """All files' row groups in order; `columns` None takes those of the first file."""
    groups: list[RowGroup] = []
    digest = hashlib.blake2b(digest_size=16)
    for path in paths:
        try:
            metadata, schema = pq.read_metadata(path), pq.read_schema(path)
        except (pa.ArrowInvalid, OSError) as error:
            raise ParquetError(f"{path} must be a complete parquet file: {error}; was it cut short?") from error
        columns = list(columns or schema.names)
        if missing := [c for c in columns if c not in schema.names]:
            raise ParquetError(f"{path} must have the columns {missing}, it has {schema.names}")
        for g in range(metadata.num_row_groups):
            group = metadata.row_group(g)
            groups.append(RowGroup(path, g, group.num_rows))
            digest.update(f"{Path(path).name} {g} {group.num_rows} {group.total_byte_size};".encode())
    return Footers(tuple(groups), tuple(columns or ()), digest.hexdigest())
