"""A stopped epoch goes on with any number of ranks and workers: every row that was left, once."""

import itertools
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import _utils as loader_utils
from torchdata.stateful_dataloader import StatefulDataLoader

from fs_data.parquet import ParquetError, ParquetUIHDataset
from fs_data.parquet.deal import Piece, Round, deal, rest_after
from fs_data.parquet.mix import shares
from tests.fs_data.test_parquet import write

readers = st.tuples(st.integers(1, 4), st.integers(1, 3))  # ranks, workers


def as_worker(worker: int, num_workers: int) -> Any:
    """What a dataset sees in a worker process, without the process."""
    info = loader_utils.worker.WorkerInfo(id=worker, num_workers=num_workers, seed=0, dataset=None)
    return mock.patch.object(loader_utils.worker, "_worker_info", info)


def read_some(
    source: Any, ranks: int, workers: int, stops: Sequence[int], states: Sequence[Any] = (), **options: Any
) -> tuple[Counter[int], list[dict[str, Any]]]:
    """Users that all readers read, each up to as many batches as its turn of `stops` says, and their states."""
    read: Counter[int] = Counter()
    saved = []
    for turn, (rank, worker) in enumerate(itertools.product(range(ranks), range(workers))):
        dataset = ParquetUIHDataset(source, rank=rank, world_size=ranks, columns=["user"], **options)
        if states:
            dataset.reshard(states)
        with as_worker(worker, workers):
            for batch in itertools.islice(dataset, stops[turn % len(stops)]):
                read.update(batch["user"].tolist())
            saved.append(dataset.state_dict())
    return read, saved


@settings(max_examples=40)
@given(
    groups=st.lists(st.integers(1, 12), min_size=1, max_size=7),
    worlds=st.lists(readers, min_size=2, max_size=3),
    stops=st.lists(st.integers(0, 4), min_size=1, max_size=5),
    batch_sizes=st.lists(st.integers(1, 5), min_size=3, max_size=3),
    shuffle=st.booleans(),
)
def test_other_readers_read_exactly_the_rest(
    tmp_path_factory: pytest.TempPathFactory,
    groups: list[int],
    worlds: list[tuple[int, int]],
    stops: list[int],
    batch_sizes: list[int],
    shuffle: bool,
) -> None:
    file = tmp_path_factory.mktemp("reshard") / "h.parquet"
    rows = write(file, groups)
    total: Counter[int] = Counter()
    states: list[Any] = []
    for i, (ranks, workers) in enumerate(worlds):
        last = i == len(worlds) - 1
        read, states = read_some(
            file, ranks, workers, [1 << 30] if last else stops, states,
            batch_size=batch_sizes[i], shuffle=shuffle, prefetch_bytes=0,
        )  # fmt: skip
        total += read
    assert total == Counter(user for user, _, _ in rows)


@given(
    groups=st.lists(st.integers(1, 30), min_size=1, max_size=10),
    rounds=st.lists(st.tuples(st.integers(1, 5), st.integers(1, 8), st.data()), max_size=3),
)
def test_rounds_leave_what_their_readers_did_not_reach(groups: list[int], rounds: list[Any]) -> None:
    pieces = [Piece(g, 0, n) for g, n in enumerate(groups)]
    left = {(g, r) for g, n in enumerate(groups) for r in range(n)}
    done: list[Round] = []
    for num_readers, spread, data in rounds:
        hands = deal(rest_after(pieces, done), num_readers, spread=spread)
        positions = [data.draw(st.integers(0, sum(map(len, hand)))) for hand in hands]
        for hand, position in zip(hands, positions, strict=True):
            left -= set([(p.group, r) for p in hand for r in range(p.start, p.stop)][:position])
        done.append(Round(num_readers, spread, tuple(positions)))
        rest = [(p.group, r) for p in rest_after(pieces, done) for r in range(p.start, p.stop)]
        assert rest == sorted(left)


def test_states_of_loaders_with_workers_are_joined(tmp_path: Path) -> None:
    rows = write(tmp_path / "h.parquet", [7, 3, 5, 1, 9, 4])
    read: Counter[int] = Counter()
    saved = []
    for rank in range(2):
        dataset = ParquetUIHDataset(tmp_path, batch_size=2, rank=rank, world_size=2)
        loader = StatefulDataLoader(dataset, batch_size=None, num_workers=2, multiprocessing_context="forkserver")
        batches = iter(loader)
        for _ in range(3):
            read.update(next(batches)["user"].tolist())
        saved.append({"step": 3, "loader": loader.state_dict()})
        del batches
    (dataset,) = [ParquetUIHDataset(tmp_path, batch_size=4)]
    dataset.reshard(saved)
    rest = [n for batch in StatefulDataLoader(dataset, batch_size=None) for n in batch["user"].tolist()]
    assert read + Counter(rest) == Counter(user for user, _, _ in rows)
    assert len(list(dataset)) == 8  # the next pass is a whole one


def test_workers_of_a_second_pass_start_anew(tmp_path: Path) -> None:
    rows = write(tmp_path / "h.parquet", [6, 6])
    _, saved = read_some(tmp_path, 1, 1, [2], batch_size=3)
    dataset = ParquetUIHDataset(tmp_path, batch_size=3)
    dataset.reshard(saved)
    loader = StatefulDataLoader(dataset, batch_size=None, num_workers=2, multiprocessing_context="forkserver")
    assert [sum(len(b["user"]) for b in loader) for _ in range(2)] == [6, len(rows)]


def test_persistent_workers_see_the_epoch(tmp_path: Path) -> None:
    rows = write(tmp_path / "h.parquet", [7, 3, 5, 8])
    dataset = ParquetUIHDataset(tmp_path, batch_size=4, shuffle=True)
    loader = StatefulDataLoader(
        dataset, batch_size=None, num_workers=1, persistent_workers=True, multiprocessing_context="spawn"
    )
    orders = []
    for epoch in range(2):
        dataset.set_epoch(epoch)
        orders.append([n for b in loader for n in b["user"].tolist()])
    assert orders[0] != orders[1]
    assert sorted(orders[0]) == sorted(orders[1]) == [user for user, _, _ in rows]
    assert dataset.stats().rows_read == 2 * len(rows)  # counted by the worker, seen here


def test_missing_and_foreign_states_are_named(tmp_path: Path) -> None:
    write(tmp_path / "h.parquet", [7, 3])
    _, saved = read_some(tmp_path, 2, 2, [1], batch_size=2)
    dataset = ParquetUIHDataset(tmp_path, batch_size=2)
    with pytest.raises(ParquetError, match="missing: rank 0 worker 1"):
        dataset.reshard([s for s in saved if s["reader"] != [0, 2, 1, 2]])
    with pytest.raises(ParquetError, match="for each reader, got none"):
        dataset.reshard([{"step": 3}])
    with pytest.raises(ParquetError, match="must agree in batch_size"):
        dataset.reshard([saved[0] | {"batch_size": 3}, *saved[1:]])
    with pytest.raises(ParquetError, match="save with snapshot_every_n_steps=1"):
        dataset.reshard([{"_steps_since_snapshot": 2, "inner": saved}])
    with pytest.raises(ParquetError, match=r"same shuffle, seed, quotas and predicate"):
        ParquetUIHDataset(tmp_path, batch_size=2, shuffle=True).reshard(saved)


@given(
    quotas=st.lists(st.floats(0.1, 10), min_size=1, max_size=4),
    sizes=st.lists(st.integers(1, 40), min_size=1, max_size=8),
)
def test_quotas_hold_to_less_than_a_row_a_source(quotas: list[float], sizes: list[int]) -> None:
    yielded = [0] * len(quotas)
    for size in sizes:
        taken = shares(quotas, yielded, size)
        assert sum(taken) == size
        assert min(taken) >= 0
        yielded = [y + t for y, t in zip(yielded, taken, strict=True)]
        for y, q in zip(yielded, quotas, strict=True):
            assert abs(y - q / sum(quotas) * sum(yielded)) < len(quotas)


def test_sources_mix_by_quota_until_one_ends_and_resume(tmp_path: Path) -> None:
    few = write(tmp_path / "few.parquet", [6, 6])
    many = write(tmp_path / "many.parquet", [20, 20], first=1000)
    sources = {tmp_path / "few.parquet": 1, tmp_path / "many.parquet": 3}

    def make() -> ParquetUIHDataset:
        return ParquetUIHDataset(sources, batch_size=4)

    dataset, states, batches = make(), [], []
    for batch in dataset:
        batches.append(batch["user"].tolist())
        states.append(dataset.state_dict())
    assert [sum(n < 1000 for n in b) for b in batches] == [1] * 12 + [0]
    assert sorted(n for b in batches for n in b) == [user for user, _, _ in few + many]
    for done, state in enumerate(states, start=1):
        fresh = make()
        fresh.load_state_dict(state)
        assert [b["user"].tolist() for b in fresh] == batches[done:], done
    read, saved = read_some(sources, 2, 1, [3], batch_size=4)
    rest, _ = read_some(sources, 3, 2, [99], saved, batch_size=4)
    assert read + rest == Counter(user for user, _, _ in few + many)


def test_time_skew_is_reported_in_rows(tmp_path: Path) -> None:
    write(tmp_path / "h.parquet", [10] * 8)
    datasets = [ParquetUIHDataset(tmp_path, batch_size=5, rank=r, world_size=4) for r in range(4)]
    for dataset in datasets:
        assert sum(len(b["user"]) for b in dataset) == 20
    assert datasets[0].stats().skew_rows == 30  # the fourth rank's group begins 30 rows after the first rank's
    assert torch.equal(next(iter(datasets[3]))["user"], torch.arange(30, 35))
