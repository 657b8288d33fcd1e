"""`ParquetUIHDataset`: batches of user interaction histories (UIH) from parquet files."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch
import torch.distributed as dist
from torch.utils.data import IterableDataset, get_worker_info

from fs_data.parquet.columns import Column, concatenate, newest, rows, take, to_column
from fs_data.parquet.deal import Piece, deal
from fs_data.parquet.errors import ParquetError
from fs_data.parquet.files import find_files, read_footers

_VERSION = 1


class ParquetUIHDataset(IterableDataset[dict[str, Column]]):
    """Batches `{column: (B,) tensor | JaggedColumn}`, exact to the row after a restart.

    Row groups are dealt in turn to ranks and workers, and cut only where one reader would otherwise end more than a
    batch after another; batches run across groups. Use it alone, or by `StatefulDataLoader(dataset, batch_size=None)`.

    Args:
        source: A parquet file, a folder of them, a glob, or a sequence of these.
        columns: Those to read, in this order; None reads all. Lists and scalars of integers, floats or booleans.
        batch_size: Rows a batch; a reader's last batch holds what is left.
        rank, world_size: Taken from torch.distributed where None, else 0 and 1.
        max_uih: Keeps the newest that many items of each list.
        shuffle: Another order of groups, and of rows within a group, for each `seed` and epoch. Without it, rows come
            in the files' order.

    Raises:
        FileNotFoundError: Nothing at `source`.
        ParquetError: A broken file, a column that is not there or of another type, a null; with the place.
    """

    def __init__(
        self,
        source: str | Path | Sequence[str | Path],
        *,
        columns: Sequence[str] | None = None,
        batch_size: int,
        rank: int | None = None,
        world_size: int | None = None,
        max_uih: int | None = None,
        shuffle: bool = False,
        seed: int = 0,
    ) -> None:
        super().__init__()
        for name, value in (("batch_size", batch_size), ("max_uih", 1 if max_uih is None else max_uih)):
            if value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        is_distributed = dist.is_available() and dist.is_initialized()
        self.rank = rank if rank is not None else dist.get_rank() if is_distributed else 0
        self.world_size = world_size if world_size is not None else dist.get_world_size() if is_distributed else 1
        if not 0 <= self.rank < self.world_size:
            raise ValueError(f"rank must be from 0 to world_size - 1, got {self.rank} of {self.world_size}")
        self.footers = read_footers(find_files(source), columns)
        self.batch_size, self.max_uih, self.shuffle, self.seed = batch_size, max_uih, shuffle, seed
        self.epoch = 0
        self._rows_read = 0  # of this reader in this epoch, up to the batch that was yielded last
        self._resumes = False

    @property
    def num_rows(self) -> int:
        """Of all readers together."""
        return sum(g.num_rows for g in self.footers.groups)

    def set_epoch(self, epoch: int) -> None:
        """Another order, where `shuffle` is set; a position within another epoch is dropped."""
        if epoch != self.epoch:
            self.epoch, self._rows_read, self._resumes = epoch, 0, False

    def state_dict(self) -> dict[str, Any]:
        """Plain values: where this reader stands, and for which files and readers that holds."""
        return {
            "version": _VERSION,
            "epoch": self.epoch,
            "rows_read": self._rows_read,
            "reader": [self.rank, self.world_size, *_worker()],
            "order": [self.shuffle, self.seed],
            "checksum": self.footers.checksum,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The next iteration goes on after the last batch that the saved one had yielded.

        Raises:
            ParquetError: The state is for other files, another order, or another number of ranks or workers.
        """
        mine = self.state_dict()
        for key, what in (
            ("version", "format"),
            ("checksum", "files"),
            ("order", "shuffle and seed"),
            ("reader", "reader"),
        ):
            if state[key] != mine[key]:
                raise ParquetError(
                    f"a dataset's state must be loaded for the same {what}: saved {state[key]}, here {mine[key]}; "
                    "start the epoch anew, or restore what it was saved with"
                )
        self.epoch, self._rows_read, self._resumes = state["epoch"], state["rows_read"], True

    def __iter__(self) -> Iterator[dict[str, Column]]:
        if not self._resumes:
            self._rows_read = 0
        self._resumes = False
        waiting: list[dict[str, Column]] = []  # less than a batch of rows, in parts
        num_waiting = 0
        for part, num_rows in self._parts(skip=self._rows_read):
            used = 0
            while num_waiting + num_rows - used >= self.batch_size:
                missing = self.batch_size - num_waiting
                waiting.append(_slice(part, used, used + missing))
                used += missing
                self._rows_read += self.batch_size
                yield _join(waiting)
                waiting, num_waiting = [], 0
            if used < num_rows:
                waiting.append(_slice(part, used, num_rows))
                num_waiting += num_rows - used
        if waiting:
            self._rows_read += num_waiting
            yield _join(waiting)

    def _parts(self, skip: int) -> Iterator[tuple[dict[str, Column], int]]:
        """Columns of this reader's pieces, less the first `skip` rows, with their numbers of rows."""
        file: tuple[str, pq.ParquetFile] | None = None
        for piece in self._pieces():
            if skip >= len(piece):
                skip -= len(piece)
                continue
            group = self.footers.groups[piece.group]
            if file is None or file[0] != group.path:
                file = (group.path, pq.ParquetFile(group.path))
            yield self._read(file[1], piece, skip), len(piece) - skip
            skip = 0

    def _read(self, file: pq.ParquetFile, piece: Piece, skip: int) -> dict[str, Column]:
        group = self.footers.groups[piece.group]
        place = f"{group.path}, row group {group.index}"
        names = list(self.footers.columns)
        try:
            table = file.read_row_group(group.index, columns=names, use_threads=False)
        except (pa.ArrowInvalid, OSError) as error:
            raise ParquetError(f"{place}: must be readable: {error}") from error
        order: torch.Tensor | None = None
        if self.shuffle:
            generator = torch.Generator().manual_seed(hash((self.seed, self.epoch, piece.group)) & 0x7FFFFFFF)
            order = torch.randperm(len(piece), generator=generator)[skip:] + piece.start
        out: dict[str, Column] = {}
        for name in names:
            column = to_column(table[name], name, place)
            column = take(column, order) if order is not None else rows(column, piece.start + skip, piece.stop)
            out[name] = column if self.max_uih is None else newest(column, self.max_uih)
        return out

    def _pieces(self) -> list[Piece]:
        worker, num_workers = _worker()
        group_rows = [g.num_rows for g in self.footers.groups]
        order: list[int] | None = None
        if self.shuffle:
            generator = torch.Generator().manual_seed(hash((self.seed, self.epoch)) & 0x7FFFFFFF)
            order = torch.randperm(len(group_rows), generator=generator).tolist()
        # Neighbouring groups go to different ranks: all of them move through the files together.
        reader, num_readers = worker * self.world_size + self.rank, num_workers * self.world_size
        return deal(group_rows, num_readers, spread=self.batch_size, order=order)[reader]


def _worker() -> tuple[int, int]:
    info = get_worker_info()
    return (0, 1) if info is None else (info.id, info.num_workers)


def _slice(part: dict[str, Column], start: int, stop: int) -> dict[str, Column]:
    return {name: rows(column, start, stop) for name, column in part.items()}


def _join(parts: list[dict[str, Column]]) -> dict[str, Column]:
    return {name: concatenate([part[name] for part in parts]) for name in parts[0]}
