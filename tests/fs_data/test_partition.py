"""Laws of every partitioner, and the figures that make few_moves the default."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fs_data import RuntimeInfo, WorldBatch
from fs_data.partition import FewMoves, Partitioner, fbs, identity, make

BALANCING = [fbs, FewMoves(), FewMoves(tolerance=0.01)]


def world(costs: list[list[int]]) -> WorldBatch:
    """Samples of each rank by cost; tokens and bytes are the cost."""
    cost = np.array([c for of_rank in costs for c in of_rank], np.int64)
    rank = np.repeat(np.arange(len(costs)), [len(of_rank) for of_rank in costs])
    return WorldBatch(world_size=len(costs), rank=rank, cost=cost, num_tokens=cost, num_bytes=cost)


def lognormal(num_ranks: int, batch: int, seed: int = 0) -> WorldBatch:
    lengths = (
        np.random.default_rng(seed).lognormal(np.log(3500), 0.9, num_ranks * batch).clip(1, 21_000).astype(np.int64)
    )
    rank = np.repeat(np.arange(num_ranks), batch)
    cost = 10 * 1024**2 * lengths + 2048 * lengths**2
    return WorldBatch(world_size=num_ranks, rank=rank, cost=cost, num_tokens=lengths, num_bytes=8 * lengths)


def loads(w: WorldBatch, assignment: np.ndarray) -> np.ndarray:
    return np.bincount(assignment, weights=w.cost, minlength=w.world_size)


ranks_of_costs = st.lists(st.lists(st.integers(0, 50), max_size=9), min_size=1, max_size=5).filter(lambda x: any(x))


@pytest.mark.parametrize("partition", BALANCING)
@given(ranks_of_costs)
def test_counts_differ_by_at_most_one(partition: Partitioner, costs: list[list[int]]) -> None:
    w = world(costs)
    count = np.bincount(partition(w, RuntimeInfo()), minlength=w.world_size)
    assert len(count) == w.world_size
    assert count.max() - count.min() <= 1


@pytest.mark.parametrize("partition", [*BALANCING, identity])
@given(ranks_of_costs)
def test_a_plan_is_a_function_of_its_input(partition: Partitioner, costs: list[list[int]]) -> None:
    w = world(costs)
    before = w.rank.copy()
    assert (partition(w, RuntimeInfo()) == partition(w, RuntimeInfo())).all()
    assert (w.rank == before).all()


@given(st.lists(st.lists(st.integers(0, 50), min_size=4, max_size=4), min_size=1, max_size=5))
def test_few_moves_is_never_worse_than_as_dealt(costs: list[list[int]]) -> None:
    w = world(costs)
    assert loads(w, FewMoves()(w, RuntimeInfo())).max() <= loads(w, w.rank).max()


def test_zig_zag_deals_positions_as_written() -> None:
    w = world([[8, 7, 6], [5, 4, 3]])
    assert fbs(w, RuntimeInfo()).tolist() == [0, 1, 1, 0, 0, 1]


def test_equal_costs_go_by_global_index() -> None:
    assert fbs(world([[5, 5], [5, 5]]), RuntimeInfo()).tolist() == [0, 1, 1, 0]
    assert FewMoves()(world([[5, 5], [5, 5]]), RuntimeInfo()).tolist() == [0, 0, 1, 1]


def test_few_moves_balances_lognormal_lengths_and_moves_little() -> None:
    w = lognormal(64, 128)
    assignment = FewMoves(tolerance=0.01)(w, RuntimeInfo())
    load = loads(w, assignment)
    assert load.max() / load.mean() - 1 <= 0.01
    moved = w.num_bytes[assignment != w.rank].sum() / w.num_bytes.sum()
    assert moved <= 0.06
    zigzag = fbs(w, RuntimeInfo())
    assert w.num_bytes[zigzag != w.rank].sum() / w.num_bytes.sum() > 0.9


@pytest.mark.parametrize("sizes", [(206 // 4 + 1, 51, 51, 52), (8, 1), (0, 5, 1), (100, 107)])
def test_uneven_ranks_are_levelled(sizes: tuple[int, ...]) -> None:
    w = world([[1 + i % 7 for i in range(n)] for n in sizes])
    count = np.bincount(FewMoves()(w, RuntimeInfo()), minlength=len(sizes))
    assert count.max() - count.min() <= 1


def test_lengths_one_and_a_thousand_alternating_are_balanced() -> None:
    w = world([[1000, 1000, 1000, 1000], [1, 1, 1, 1]])
    assert len(set(loads(w, FewMoves()(w, RuntimeInfo())).tolist())) == 1


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(ValueError, match="few_moves"):
        make("fewmoves")
