"""Laws of every partitioner, the reports of other balancers' users, and the figures that make few_moves the default."""

import os
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from numpy.typing import NDArray

from fs_data import LoaderError, RuntimeInfo, WorldBatch
from fs_data.partition import NAMES, FewMoves, Partitioner, fbs, identity, lpt, make, report
from fs_data.partition.longest_first import by_heap, by_rounds
from fs_data.partition.order import most_expensive_first
from tests.fs_data.worlds import counts, even, heavy_tailed, loads, ragged, world

NOW = RuntimeInfo()
EQUAL_COUNTS = [fbs, lpt, FewMoves(), FewMoves(tolerance=0.01), FewMoves(tolerance=0)]
BALANCING = [*EQUAL_COUNTS, make("vbs")]


def name_of(partition: Partitioner) -> str:
    return getattr(partition, "__name__", repr(partition))


# ---- laws -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("partition", EQUAL_COUNTS, ids=name_of)
@given(ragged())
def test_counts_differ_by_at_most_one(partition: Partitioner, costs: list[list[int]]) -> None:
    w = world(costs)
    count = counts(w, partition(w, NOW))
    assert len(count) == w.world_size
    assert count.max() - count.min() <= 1


@pytest.mark.parametrize("partition", [*BALANCING, identity], ids=name_of)
@given(ragged())
def test_every_sample_goes_to_one_rank_and_every_rank_gets_one(partition: Partitioner, costs: list[list[int]]) -> None:
    w = world(costs)
    destination = partition(w, NOW)
    assert destination.shape == w.rank.shape
    assert destination.dtype == np.int64
    assert 0 <= destination.min() <= destination.max() < w.world_size
    if partition is not identity and len(w.rank) >= w.world_size:
        assert counts(w, destination).min() >= 1


@pytest.mark.parametrize("partition", [*BALANCING, identity], ids=name_of)
@given(ragged())
def test_a_plan_is_a_function_of_its_input_and_leaves_it_alone(partition: Partitioner, costs: list[list[int]]) -> None:
    w = world(costs)
    before = (w.rank.copy(), w.cost.copy())
    assert (partition(w, NOW) == partition(w, NOW)).all()
    assert (w.rank == before[0]).all()
    assert (w.cost == before[1]).all()


@given(even(), st.sampled_from([0, 0.003, 0.01, 0.3]), st.data())
def test_few_moves_is_never_worse_than_as_dealt(costs: list[list[int]], tolerance: float, data: st.DataObject) -> None:
    w = world(costs)
    host = np.array(data.draw(st.lists(st.integers(0, 2), min_size=len(costs), max_size=len(costs))), np.int64)
    destination = FewMoves(tolerance)(w, RuntimeInfo(host=host))
    assert loads(w, destination).max() <= loads(w, w.rank).max()
    assert (counts(w, destination) == counts(w, w.rank)).all()


@given(even())
@example([[0, 0, 44], [0, 9, 60], [0, 9, 60], [0, 9, 60]])
def test_few_moves_leaves_what_is_even_enough_where_it_is(costs: list[list[int]]) -> None:
    w = world(costs)
    if report(w, w.rank).imbalance <= 0.1 - 1e-9:
        assert (FewMoves(tolerance=0.11)(w, NOW) == w.rank).all()


@given(st.lists(st.integers(0, 2**62), max_size=40), st.integers(0, 3))
@example([5, 5, 2**40 + 1, 2**40, 0, 2**16, 2**32], 1)
def test_most_expensive_first_is_the_stable_order(costs: list[int], repeats: int) -> None:
    cost = np.array(costs * (repeats + 1), np.int64)
    assert most_expensive_first(cost).tolist() == sorted(range(len(cost)), key=lambda s: (-int(cost[s]), s))


@pytest.mark.parametrize("make_costs", [world([[7, 7], [7, 7], [7, 7]])])
def test_equal_costs_go_by_global_index(make_costs: WorldBatch) -> None:
    assert fbs(make_costs, NOW).tolist() == [0, 1, 2, 2, 1, 0]
    assert lpt(make_costs, NOW).tolist() == [0, 1, 2, 0, 1, 2]
    assert make("vbs")(make_costs, NOW).tolist() == [0, 0, 1, 1, 2, 2]
    assert FewMoves()(make_costs, NOW).tolist() == [0, 0, 1, 1, 2, 2]


# ---- worked examples ------------------------------------------------------------------------------------------------


def test_zig_zag_deals_positions_to_and_fro() -> None:
    w = world([[12, 11, 10, 9], [8, 7, 6, 5], [4, 3, 2, 1]])
    assert fbs(w, NOW).tolist() == [0, 1, 2, 2, 1, 0, 0, 1, 2, 2, 1, 0]


def test_longest_first_gives_each_sample_to_the_least_loaded_rank_with_room() -> None:
    w = world([[9, 5, 4], [3, 2, 1]])
    assert lpt(w, NOW).tolist() == [0, 1, 1, 0, 1, 0]  # 9 | 5, 4 | a tie: 3 to rank 0 | 2 fills rank 1 | 1


@given(st.lists(st.integers(0, 40) | st.integers(0, 2**53), max_size=60), st.integers(1, 5), st.integers(0, 9))
def test_longest_first_is_the_same_by_rounds_and_one_by_one(costs: list[int], ranks: int, repeats: int) -> None:
    cost = np.array(costs * (repeats + 1), np.int64)
    order = most_expensive_first(cost)
    by_both, by_one = np.full_like(cost, -1), np.full_like(cost, -1)
    rest = by_rounds(cost, order, by_both, ranks)
    by_heap(cost, order, by_both, *rest)
    zeros = np.zeros(ranks, np.int64)
    by_heap(cost, order, by_one, 0, zeros, zeros.copy(), len(cost) % ranks)
    assert by_both.tolist() == by_one.tolist()


@pytest.mark.parametrize(
    ("cost", "by_rounds_alone"),
    [
        (np.full(64 * 50 + 7, 3), True),
        (np.concatenate([np.arange(64) * 10**6, np.full(64 * 50, 1)]), False),  # one rank takes many before the next
        (np.full(64 * 50, 2**53), False),  # loads too large to be sorted together with their ranks
    ],
)
def test_longest_first_goes_one_by_one_only_where_rounds_are_short(
    cost: NDArray[np.int64], by_rounds_alone: bool
) -> None:
    order = most_expensive_first(cost)
    destination = np.full_like(cost, -1)
    rest = by_rounds(cost, order, destination, 64)
    assert (rest.start == len(cost)) == by_rounds_alone
    by_heap(cost, order, destination, *rest)
    count = np.bincount(destination, minlength=64)
    assert count.max() - count.min() <= 1


def test_few_moves_swaps_the_dearest_sample_against_the_cheapest_that_fits() -> None:
    w = world([[10, 10, 1], [1, 1, 1]])
    assert FewMoves()(w, NOW).tolist() in ([1, 0, 0, 0, 1, 1], [0, 1, 0, 0, 1, 1])
    assert loads(w, FewMoves()(w, NOW)).tolist() == [12, 12]


def test_one_swap_within_the_host_is_preferred_to_one_across() -> None:
    w = world([[10, 10], [4, 4], [1, 1], [7, 7]])  # rank 2 has the most room, rank 1 shares the host of rank 0
    apart = FewMoves(tolerance=0.3)(w, NOW)
    together = FewMoves(tolerance=0.3)(w, RuntimeInfo(host=np.array([0, 0, 1, 1])))
    assert 2 in apart[:2]
    assert 2 not in together[:2]
    assert 1 in together[:2]


# ---- reports of other balancers' users ------------------------------------------------------------------------------


@pytest.mark.parametrize("sizes", [(52, 51, 51, 52), (52, 52, 51, 52), (8, 1), (1, 8), (0, 5, 1), (300, 0, 0)], ids=str)
@pytest.mark.parametrize("partition", EQUAL_COUNTS, ids=name_of)
def test_ranks_with_uneven_batches_are_levelled(partition: Partitioner, sizes: tuple[int, ...]) -> None:
    w = world([[1 + i % 7 for i in range(n)] for n in sizes])
    count = counts(w, partition(w, NOW))
    assert count.max() - count.min() <= 1
    assert loads(w, partition(w, NOW)).max() <= w.cost.sum() / len(sizes) + 7


def test_levelling_moves_no_more_samples_than_it_must() -> None:
    w = world([[5] * 8, [5], [5] * 4])
    assert int((FewMoves()(w, NOW) != w.rank).sum()) == 3  # 8, 1, 4 → 5, 4, 4


def test_lengths_one_and_a_thousand_alternating_are_balanced() -> None:
    w = world([[1000, 1000, 1000, 1000], [1, 1, 1, 1]])
    assert len(set(loads(w, FewMoves()(w, NOW)).tolist())) == 1


def test_without_balancing_samples_stay_in_place() -> None:
    w = heavy_tailed(4, 8)
    assert (make("identity")(w, NOW) == w.rank).all()


def test_a_sample_dearer_than_a_ranks_mean_is_the_bound_and_stops_the_swapping() -> None:
    w = world([[1000, 1, 1], [10, 10, 10], [10, 10, 10]])
    r = report(w, FewMoves()(w, NOW))
    assert r.bound == pytest.approx(1000 / (1062 / 3) - 1)
    assert r.imbalance == pytest.approx(1002 / (1062 / 3) - 1)
    assert r.bytes_moved_share == 0


# ---- figures --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "most_moved"), [("lognormal", 0.05), ("pareto", 0.2)])
def test_few_moves_at_one_per_cent_moves_little(kind: str, most_moved: float) -> None:
    w = heavy_tailed(256, 128, kind=kind)
    r, zigzag = report(w, FewMoves(tolerance=0.01)(w, NOW)), report(w, fbs(w, NOW))
    assert r.imbalance <= 0.01 + r.bound
    assert r.bytes_moved_share <= most_moved
    assert zigzag.bytes_moved_share > 0.9
    if kind == "lognormal":
        assert r.busiest_rank_bytes <= zigzag.busiest_rank_bytes / 3


def test_longest_first_is_even_to_a_thousandth() -> None:
    w = heavy_tailed(256, 128)
    assert report(w, lpt(w, NOW)).imbalance <= 0.001


def test_the_report_counts_what_a_reader_can_count() -> None:
    w = world([[30, 10], [10, 10]])
    r = report(w, np.array([0, 1, 0, 1]))
    assert (r.imbalance_before, r.imbalance, r.bound) == pytest.approx((40 / 30 - 1, 40 / 30 - 1, 0))
    assert r.bytes_moved_share == pytest.approx(20 / 60)
    assert r.busiest_rank_bytes == pytest.approx(80 / (480 / 2))  # each sends 80 bytes and receives 80
    assert r.peak_tokens == pytest.approx(40 / 30)
    assert (r.most_samples, r.fewest_samples) == (2, 2)


def test_a_batch_without_cost_is_even() -> None:
    w = world([[0, 0], [0, 0]])
    for partition in BALANCING:
        r = report(w, partition(w, NOW))
        assert (r.imbalance, r.bound, r.bytes_moved_share, r.peak_tokens) == (0, 0, 0, 1)


# ---- with and without numba -----------------------------------------------------------------------------------------

_PRINT_PLANS = """
import hashlib, sys
if sys.argv[1] == "without":
    sys.modules["numba"] = None
from fs_data import RuntimeInfo
from fs_data.partition import compiled, make
from tests.fs_data.worlds import heavy_tailed, world
compiled.WORTH_COMPILING = 0
worlds = [heavy_tailed(16, 24, seed, kind) for seed in range(3) for kind in ("lognormal", "pareto")]
worlds += [world([[9, 9, 1], [], [5]]), world([[3], [4]]), world([[7] * 20, [1], [2] * 5])]
for name in ("few_moves", "lpt", "fbs", "vbs"):
    print(name, hashlib.sha256(b"".join(make(name)(w, RuntimeInfo()).tobytes() for w in worlds)).hexdigest())
"""


def test_plans_are_the_same_with_and_without_numba() -> None:
    pytest.importorskip("numba", reason="numba is not installed, so there is nothing to compare with")
    run = [
        subprocess.run(
            [sys.executable, "-c", _PRINT_PLANS, variant], capture_output=True, text=True, check=True, timeout=120,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
        ).stdout
        for variant in ("with", "without")
    ]  # fmt: skip
    assert run[0].count("\n") == 4
    assert run[0] == run[1]


# ---- by name, and a user's own --------------------------------------------------------------------------------------


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"few_moves.*got 'fewmoves'"):
        make("fewmoves")
    with pytest.raises(TypeError, match="or a function, got 3"):
        make(3)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="settings go with a partitioner's name"):
        make(fbs, tolerance=0.1)
    with pytest.raises(ValueError, match="tolerance must be at least 0"):
        make("few_moves", tolerance=-1)


@pytest.mark.parametrize("name", NAMES)
def test_every_name_makes_a_partitioner(name: str) -> None:
    w = heavy_tailed(4, 8)
    assert len(make(name)(w, NOW)) == 32


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (np.zeros(3, np.int64), r"\(4,\) integers.*got \(3,\)"),
        (np.zeros(4), "integers.*float64"),
        (np.array([0, 1, 2, 0]), "ranks from 0 to 1, got 0 to 2"),
        (np.array([0, 1, -1, 0]), "ranks from 0 to 1, got -1 to 1"),
        (np.array([0, 0, 0, 0]), r"at least one sample, ranks \[1\] got none"),
    ],
)
def test_what_a_users_function_answers_is_checked(answer: NDArray[Any], message: str) -> None:
    def mine(w: WorldBatch, runtime: RuntimeInfo) -> NDArray[Any]:
        return answer

    with pytest.raises(LoaderError, match="mine must give .*" + message):
        make(mine)(world([[1, 2], [3, 4]]), NOW)


def test_a_users_list_of_ranks_is_a_plan() -> None:
    assert make(lambda w, runtime: [1, 0, 1, 0])(world([[1, 2], [3, 4]]), NOW).tolist() == [1, 0, 1, 0]  # pyright: ignore
