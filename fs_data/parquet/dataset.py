"""`ParquetUIHDataset`: batches of user interaction histories (UIH) from parquet files."""

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch.utils.data import IterableDataset, get_worker_info

from fs_data.parquet.ahead import read_ahead
from fs_data.parquet.arguments import names_of, quotas_of, vocabularies_of, whole
from fs_data.parquet.board import MAX_WORKERS, Board, ParquetStats
from fs_data.parquet.bounded import Deadline
from fs_data.parquet.columns import Column, concatenate
from fs_data.parquet.convert import Vocabulary
from fs_data.parquet.deal import Piece, Round, deal, rest_after, rest_of, time_skew
from fs_data.parquet.errors import Patience, with_retries
from fs_data.parquet.files import Source, find_files
from fs_data.parquet.footers import Footers, read_footers
from fs_data.parquet.mix import shares
from fs_data.parquet.reader import Part, PieceReader, ReadOptions
from fs_data.parquet.state import KIND, VERSION, check_files, check_same, find_states, join
from fs_data.parquet.stream import Stream
from fs_data.parquet.where import Where, alternatives, described


class ParquetUIHDataset(IterableDataset[dict[str, Column]]):
    """Batches `{column: (B, ...) tensor | JaggedColumn | NestedColumn}`, exact to the row after a restart.

    Row groups are dealt in turn to ranks and workers, and cut only where one reader would otherwise end more than a
    batch after another; batches run across groups. Use it alone, or by `StatefulDataLoader(dataset, batch_size=None)`;
    prefer spawn or forkserver for workers.

    Args:
        source: A parquet file, a folder of them, a glob, a URL, or a sequence of these. A mapping `{source: quota}`
            mixes several: each batch holds rows of all of them in these proportions, until one has no more; then the
            others go on in theirs.
        columns: Those to read, in this order; None reads all. `name.field` reads one field of structs.
        batch_size: Rows a batch; a reader's last batch holds what is left.
        rank, world_size: Taken from torch.distributed where None, else 0 and 1.
        max_uih: Keeps the newest that many items of each list.
        where: Reads only rows for which all terms `(column, operator, value)` hold; a list of such lists: for which one
            of the lists does. Row groups that cannot hold any, by their footers or directories, are not read. A null
            passes only `not in` without it, and `in` with it.
        vocabularies: For columns of texts: `{column: texts}`; a text becomes its place among them.
        shuffle: Another order of groups, and of rows within a group, for each `seed` and epoch. Without it, rows come
            in the files' order.
        prefetch_bytes: Most memory of row groups that are read ahead in a thread, and the one in use; a single larger
            group is read nevertheless. 0 reads each group when it is needed.
        filesystem: A pyarrow or fsspec filesystem that the source lies on; None goes by its URL.
        on_error: `"raise"`, or `"skip"`: leaves out rows with nulls, row groups that cannot be read and files that do
            not fit, and counts them in `stats()`.
        retries, backoff_s: How often a failed access is tried again, and after how long; doubled each time.
        timeout_s: Longest wait for a listing, a footer or a row group, all retries included.

    Raises:
        FileNotFoundError: Nothing at `source`.
        ParquetError: A broken file, a column that is not there or of another type, a null; with the place.
        ValueError: An argument that cannot be; the text says what it must be.
    """

    def __init__(
        self,
        source: Source | Mapping[str, float],
        *,
        columns: Sequence[str] | None = None,
        batch_size: int,
        rank: int | None = None,
        world_size: int | None = None,
        max_uih: int | None = None,
        where: Where | None = None,
        vocabularies: Mapping[str, Vocabulary] | None = None,
        shuffle: bool = False,
        seed: int = 0,
        prefetch_bytes: int = 64 << 20,
        filesystem: Any = None,
        on_error: Literal["raise", "skip"] = "raise",
        retries: int = 3,
        backoff_s: float = 0.5,
        timeout_s: float = 300,
    ) -> None:
        super().__init__()
        sources, names = quotas_of(source), names_of(columns)
        prefetch_bytes, retries = whole("prefetch_bytes", prefetch_bytes, 0), whole("retries", retries, 0)
        if not (backoff_s >= 0 and timeout_s > 0):
            raise ValueError(f"backoff_s must be at least 0 and timeout_s more, got {backoff_s} and {timeout_s}")
        if on_error not in ("raise", "skip"):
            raise ValueError(f"on_error must be 'raise' or 'skip', got {on_error!r}")
        is_distributed = dist.is_available() and dist.is_initialized()
        rank = rank if rank is not None else dist.get_rank() if is_distributed else 0
        world_size = world_size if world_size is not None else dist.get_world_size() if is_distributed else 1
        self.rank, self.world_size = whole("rank", rank, 0), whole("world_size", world_size, 1)
        if self.rank >= self.world_size:
            raise ValueError(f"rank must be from 0 to world_size - 1, got {self.rank} of {self.world_size}")
        self.quotas = [quota for _, quota in sources]
        self.batch_size, self.shuffle = whole("batch_size", batch_size, 1), bool(shuffle)
        self.seed = whole("seed", seed, 0)
        self._max_bytes = prefetch_bytes // len(sources)
        parts = alternatives(where) if where is not None else []
        self._options = ReadOptions(
            max_uih=None if max_uih is None else whole("max_uih", max_uih, 1), where=tuple(map(tuple, parts)),
            vocabularies=vocabularies_of(vocabularies), on_error=on_error,
            patience=Patience(retries=retries, backoff_s=backoff_s, timeout_s=timeout_s),
        )  # fmt: skip
        self._board = Board()
        self.footers: list[Footers] = []
        types: dict[str, Any] = {}
        for one, _ in sources:
            footers = self._read_footers(one, names, types, filesystem)
            self.footers.append(footers)
            if footers.files:  # the others must have the same columns
                names, types = list(footers.outputs), {**footers.types, **footers.partitions}
        self._rounds: list[list[Round]] = [[] for _ in sources]
        self._positions = [0] * len(sources)  # rows of this reader's hands up to the batch that was yielded last
        self._yielded = [0] * len(sources)  # rows of each source so far, for the quotas

    def _read_footers(
        self, source: Any, columns: list[str] | None, types: Mapping[str, Any], filesystem: Any
    ) -> Footers:
        def attempt(place: str, is_local: bool, action: Callable[[Deadline], Any]) -> Any:
            deadline = Deadline()
            return with_retries(
                partial(action, deadline), place, self._options.patience,
                is_local=is_local, deadline=deadline, on_retry=partial(self._board.count, 0, "retries", 1),
            )  # fmt: skip

        return read_footers(
            find_files(source, filesystem, attempt), columns, types, where=self._options.where,
            vocabularies=self._options.vocabularies, attempt=attempt, skip=self._options.on_error == "skip",
        )  # fmt: skip

    @property
    def num_rows(self) -> int:
        """Of all readers together, before predicates on rows."""
        return sum(g.num_rows for footers in self.footers for g in footers.groups)

    @property
    def epoch(self) -> int:
        return self._board.epoch

    def set_epoch(self, epoch: int) -> None:
        """Another order, where `shuffle` is set, in live workers too; a position within another epoch is dropped."""
        epoch = whole("epoch", epoch, 0)
        if epoch != self.epoch:
            self._board.withdraw_resume()
            self._board.epoch = epoch
            self._restart()

    def stats(self) -> ParquetStats:
        """Counts of all of this rank's workers; may be called in the training process at any time."""
        return self._board.stats(sum(len(f.skipped_files) for f in self.footers))

    def state_dict(self) -> dict[str, Any]:
        """Plain values: where this reader stands, and for which files and readers that holds."""
        return {
            "kind": KIND,
            "version": VERSION,
            "epoch": self.epoch,
            "positions": list(self._positions),
            "yielded": list(self._yielded),
            "rounds": [[[r.num_readers, r.spread, *r.positions] for r in rounds] for rounds in self._rounds],
            "reader": [self.rank, self.world_size, *_worker()],
            "batch_size": self.batch_size,
            "order": [self.shuffle, self.seed, list(self.quotas), described(self._options.where)],
            "files": [list(f.checksums) for f in self.footers],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The next iteration goes on after the last batch that the saved one had yielded.

        Raises:
            ParquetError: The state is for other files, another order, or another number of ranks or workers.
        """
        keys = {"version": "format", "order": "shuffle, seed, quotas and predicate"}
        keys |= {"reader": "reader (rank, world size, worker, workers)", "batch_size": "batch_size"}
        self._check(state, keys)
        self._resume(state, [[Round(n, s, tuple(at)) for n, s, *at in rounds] for rounds in state["rounds"]])
        self._positions, self._yielded = list(state["positions"]), list(state["yielded"])
        self._board.offer_resume(_worker()[0])

    def reshard(self, states: Iterable[Mapping[str, Any]]) -> None:
        """The next iteration reads what is left after `states`, dealt anew to this number of ranks and workers.

        Together, the new readers read every remaining row exactly once, whatever their number and `batch_size`. Call it
        on every rank, before a loader starts workers, in place of loading a loader's state.

        Args:
            states: Of all former ranks: the dataset's or the loader's that held it.

        Raises:
            ParquetError: A reader's state is missing, or they are for other files or another order.
        """
        first, joined = join([state for one in states for state in find_states(one)])
        self._check(first, {"version": "format", "order": "shuffle, seed, quotas and predicate"})
        earlier = [[Round(n, s, tuple(at)) for n, s, *at in rounds] for rounds in first["rounds"]]
        self._resume(first, [[*rounds, new] for rounds, new in zip(earlier, joined, strict=True)])
        self._board.offer_resume(None)

    def _check(self, state: Mapping[str, Any], keys: Mapping[str, str]) -> None:
        check_same(state, self.state_dict(), keys)
        paths = [[file.path for file in f.files] for f in self.footers]
        check_files(state["files"], paths, [f.checksums for f in self.footers])

    def _resume(self, state: Mapping[str, Any], rounds: list[list[Round]]) -> None:
        self._board.epoch = state["epoch"]
        self._restart()
        self._rounds = rounds

    def _restart(self) -> None:
        self._rounds = [[] for _ in self.footers]
        self._positions, self._yielded = [0] * len(self.footers), [0] * len(self.footers)

    def __iter__(self) -> Iterator[dict[str, Column]]:
        # At once, not with the first batch: a loader asks for the state before that.
        if not self._board.take_resume(_worker()[0]):
            self._restart()
        return self._batches()

    def _batches(self) -> Iterator[dict[str, Column]]:
        parts = [self._parts(source) for source in range(len(self.footers))]
        streams = [Stream(p, at) for p, at in zip(parts, self._positions, strict=True)]
        try:
            while True:
                portions: list[dict[str, Column]] = []
                missing = self.batch_size
                while missing:
                    live = [q if s.has_rows() else 0.0 for q, s in zip(self.quotas, streams, strict=True)]
                    if not any(live):
                        break
                    for source, num_rows in enumerate(shares(live, self._yielded, missing)):
                        for portion, taken in streams[source].take(num_rows):
                            portions.append(portion)
                            self._yielded[source] += taken
                            missing -= taken
                if not portions:
                    return
                self._positions = [s.position for s in streams]
                yield {name: concatenate([p[name] for p in portions]) for name in portions[0]}
        finally:
            for p in parts:
                p.close()

    def _parts(self, source: int) -> Generator[Part, None, None]:
        """This reader's rows of one source, from its position on."""
        footers = self.footers[source]
        worker, num_workers = _worker()
        if num_workers > MAX_WORKERS:
            raise ValueError(f"num_workers must be at most {MAX_WORKERS}, got {num_workers}")
        reader = PieceReader(footers, self._options, partial(self._board.count, worker))
        epoch = self.epoch

        def read(piece: Piece) -> Part:
            num_rows = footers.groups[piece.group].num_rows
            order = self._permutation(num_rows, epoch, source, piece.group) if self.shuffle else None
            return reader.read(piece, order)

        # Rows in another order are a copy, beside the group that they are picked from.
        def num_bytes(piece: Piece) -> int:
            return footers.groups[piece.group].num_bytes * (2 if self.shuffle else 1)

        def reading_bytes(piece: Piece) -> int:
            group = footers.groups[piece.group]
            return group.decoding_bytes + (group.num_bytes if self.shuffle else 0)

        hand, timeout_s = self._hand(source), self._options.patience.timeout_s
        try:
            yield from read_ahead(hand, read, num_bytes, reading_bytes, max_bytes=self._max_bytes, timeout_s=timeout_s)
        finally:
            reader.give_up()

    def _hand(self, source: int) -> list[Piece]:
        groups = self.footers[source].groups
        order: Sequence[int] = range(len(groups))
        if self.shuffle:
            order = self._permutation(len(groups), self.epoch, source).tolist()
        pieces = rest_after([Piece(g, 0, groups[g].num_rows) for g in order], self._rounds[source])
        # Neighbouring groups go to different ranks: all of them move through the files together.
        worker, num_workers = _worker()
        reader, num_readers = worker * self.world_size + self.rank, num_workers * self.world_size
        hands = deal(pieces, num_readers, spread=self.batch_size)
        if not self.shuffle and worker == 0 and num_readers > 1:
            self._board.skew_rows = time_skew(hands, [g.num_rows for g in groups], self.batch_size)
        return rest_of(hands[reader], self._positions[source])

    def _permutation(self, n: int, *key: int) -> NDArray[np.int64]:
        mixed = int(np.random.SeedSequence([self.seed, *key]).generate_state(1, np.uint64)[0] >> np.uint64(1))
        return torch.randperm(n, generator=torch.Generator().manual_seed(mixed)).numpy()


def _worker() -> tuple[int, int]:
    info = get_worker_info()
    return (0, 1) if info is None else (info.id, info.num_workers)
