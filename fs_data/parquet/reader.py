"""Reads one piece of a row group: opens, filters, refuses or drops what is broken, and converts."""

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from numpy.typing import NDArray

from fs_data.parquet.board import Count
from fs_data.parquet.bounded import Deadline
from fs_data.parquet.columns import Column, newest, rows, take
from fs_data.parquet.convert import Vocabulary, fault_of, faulty_rows, to_columns
from fs_data.parquet.deal import Piece
from fs_data.parquet.errors import ParquetError, Patience, with_retries
from fs_data.parquet.files import File
from fs_data.parquet.footers import Footers, RowGroup, checksum, partition_value
from fs_data.parquet.where import Term, expression


@dataclass(frozen=True, kw_only=True, slots=True)
class ReadOptions:
    """How rows become columns; the same for all readers."""

    max_uih: int | None
    where: tuple[tuple[Term, ...], ...]
    vocabularies: Mapping[str, Vocabulary]
    on_error: Literal["raise", "skip"]
    patience: Patience


@dataclass(frozen=True, slots=True)
class Part:
    """The rows of a piece that are left after predicate and policy."""

    columns: dict[str, Column]
    rows: NDArray[np.int64]
    """`(K,)`: where in the piece each one lies."""
    piece_rows: int


class PieceReader:
    """Pieces of one source; used by one thread at a time, in the process that made it."""

    def __init__(self, footers: Footers, options: ReadOptions, count: Callable[[Count, int], None]) -> None:
        self._footers, self._options, self._count = footers, options, count
        self._thread = threading.local()  # an open file belongs to one thread
        self._deadline = Deadline()

    def read(self, piece: Piece, order: NDArray[np.int64] | None) -> Part:
        """The piece's rows, by way of `order` `(group rows,)`, if the epoch reads the group in another one.

        Raises:
            ParquetError: Broken bytes, a changed file or, with `on_error="raise"`, a row that cannot be a tensor.
        """
        group = self._footers.groups[piece.group]
        file = self._footers.files[group.file]
        place = f"{file.path}, row group {group.index}"
        wanted = np.arange(piece.start, piece.stop) if order is None else order[piece.start : piece.stop]
        try:
            table = self._table(file, group, place)
        except (ParquetError, FileNotFoundError):
            if self._options.on_error == "raise":
                raise
            self._count("groups_skipped", 1)
            self._count("rows_skipped", len(piece))
            return Part({}, np.zeros(0, np.int64), len(piece))
        keep = self._matching(table)
        for name in self._read_for_output(table.column_names):
            bad = faulty_rows(table[name], name, self._options.vocabularies)
            bad = bad[keep[bad]]
            if not len(bad):
                continue
            if self._options.on_error == "raise":
                raise ParquetError(self._describe(table[name], name, int(bad[0]), place))
            self._count("rows_skipped", int(np.isin(bad, wanted).sum()))
            keep[bad] = False
        self._count("rows_read", len(piece))
        in_piece = np.flatnonzero(keep[wanted])
        index = wanted[in_piece]  # rows of the group
        if not keep.all():
            table = table.filter(pa.array(keep))  # by chunks: taking rows would join them, and overflow int32 offsets
            index = (np.cumsum(keep) - 1)[index]
        return Part(self._convert(table, index), in_piece, len(piece))

    def give_up(self) -> None:
        """Ends a read that is under way, so that a thread in it ends."""
        self._deadline.give_up()

    def _table(self, file: File, group: RowGroup, place: str) -> Any:
        def access() -> Any:
            try:
                opened = self._open(file, group.file)
                table = opened.read_row_group(group.index, columns=list(self._footers.types), use_threads=False)
            except Exception:
                self._thread.file = None
                raise
            return table

        table = with_retries(
            access, place, self._options.patience,
            is_local=file.is_local, deadline=self._deadline, on_retry=lambda: self._count("retries", 1),
        )  # fmt: skip
        for name, kind in self._footers.types.items():
            if not table[name].type.equals(kind):  # a list of nulls in a file without items
                table = table.set_column(table.column_names.index(name), name, table[name].cast(kind))
        for name, kind in self._footers.partitions.items():
            value = pa.scalar(partition_value(file, name, kind), kind)
            table = table.append_column(name, pa.repeat(value, table.num_rows))
        return table

    def _open(self, file: File, number: int) -> pq.ParquetFile:
        cached: tuple[int, pq.ParquetFile] | None = getattr(self._thread, "file", None)
        if cached is not None and cached[0] == number:
            return cached[1]
        opened = file.open(self._deadline)
        if checksum(opened.metadata) != self._footers.checksums[number]:
            raise ParquetError(
                f"{file.path} must stay as it was when the dataset was made; its footer has changed since: make the "
                "dataset anew"
            )
        self._thread.file = (number, opened)
        return opened

    def _matching(self, table: Any) -> NDArray[np.bool_]:
        if not self._options.where:
            return np.ones(table.num_rows, bool)
        names = list(dict.fromkeys(name for part in self._options.where for name, _, _ in part))
        tested = table.select(names).append_column("", pa.array(np.arange(table.num_rows)))
        keep = np.zeros(table.num_rows, bool)
        keep[tested.filter(expression(self._options.where))[""].to_numpy()] = True
        return keep

    def _read_for_output(self, names: Sequence[str]) -> list[str]:
        outputs = self._footers.outputs
        return [n for n in names if any(out == n or out.startswith(f"{n}.") for out in outputs)]

    def _describe(self, chunked: Any, name: str, row: int, place: str) -> str:
        what = fault_of(chunked.slice(row, 1).combine_chunks(), name, self._options.vocabularies)
        return f"{place}, column {name!r}, row {row}: {what}, drop the row, or on_error='skip'"

    def _convert(self, table: Any, index: NDArray[np.int64]) -> dict[str, Column]:
        is_run = len(index) == 0 or (
            int(index[-1]) - int(index[0]) + 1 == len(index) and bool((np.diff(index) == 1).all())
        )
        first = int(index[0]) if len(index) else 0
        found: dict[str, Column] = {}
        for name in self._read_for_output(table.column_names):
            for out, column in to_columns(table[name], name, self._options.vocabularies).items():
                if out not in self._footers.outputs:
                    continue
                picked = rows(column, first, first + len(index)) if is_run else take(column, torch.from_numpy(index))
                found[out] = picked if self._options.max_uih is None else newest(picked, self._options.max_uih)
        return {out: found[out] for out in self._footers.outputs}
