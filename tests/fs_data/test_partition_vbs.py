"""VBS: segments of equal weight, and AutoTune that evens out what the weights get wrong."""

import itertools
import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fs_data import RuntimeInfo
from fs_data.partition import Vbs, report
from fs_data.partition.vbs import corrected, notches_from_times, segments
from tests.fs_data.worlds import counts, heavy_tailed, loads, ragged, world

NOW = RuntimeInfo()


def test_sorted_samples_are_cut_where_the_weight_is_even() -> None:
    w = world([[1, 8, 2], [3, 4, 6]])  # sorted 8, 6 | 4, 3, 2, 1: half of all, 12, lies beyond the middle of the 6
    assert Vbs()(w, NOW).tolist() == [1, 0, 1, 1, 1, 0]


@given(ragged())
def test_no_rank_holds_a_sample_dearer_than_the_rank_before(costs: list[list[int]]) -> None:
    w = world(costs)
    destination = Vbs()(w, NOW)
    bounds = [(int(x.max()), int(x.min())) for r in range(w.world_size) if len(x := w.cost[destination == r])]
    assert all(cheapest >= dearest for (_, cheapest), (dearest, _) in itertools.pairwise(bounds))


@given(ragged())
def test_a_segment_is_off_its_part_by_less_than_the_dearest_sample(costs: list[list[int]]) -> None:
    w = world([[1 + c for c in of_rank] for of_rank in costs])
    destination = segments(w.cost, np.full(w.world_size, 7))
    if len(w.cost) >= 4 * w.world_size and w.cost.max() * w.world_size <= w.cost.sum():
        assert np.abs(loads(w, destination) - w.cost.sum() / w.world_size).max() <= w.cost.max()


def test_a_rank_with_half_the_share_gets_half_the_weight() -> None:
    w = heavy_tailed(4, 512)
    load = loads(w, segments(w.cost, np.array([2, 1, 2, 2])))
    assert load / load.sum() * 7 == pytest.approx([2, 1, 2, 2], rel=0.02)


def test_samples_of_a_rank_are_alike_and_counts_differ() -> None:
    w = heavy_tailed(16, 64)
    count = counts(w, Vbs()(w, NOW))
    assert count[0] * 10 < count[-1]
    assert report(w, Vbs()(w, NOW)).imbalance < 0.1


# ---- AutoTune -------------------------------------------------------------------------------------------------------

LAG = 4


def imbalance_of_times(vbs: Vbs, slowness: np.ndarray, steps: int) -> list[float]:
    """Measured max/mean − 1 by step, in a job whose ranks need `slowness` ns for a unit of cost."""
    times: list[np.ndarray] = []
    for step in range(steps):
        w = heavy_tailed(len(slowness), 256, seed=step)
        known = np.stack(times[: -LAG + 1]) if len(times) >= LAG else np.zeros((0, len(slowness)), np.int64)
        destination = vbs(w, RuntimeInfo(step=step, compute_ns=known))
        times.append(np.rint(loads(w, destination) / 1e6 * slowness).astype(np.int64))
    return [float(t.max() / t.mean() - 1) for t in times]


def test_autotune_evens_out_ranks_of_different_speed() -> None:
    slowness = np.array([1.0, 1.0, 1.4, 1.0, 0.8, 1.0, 1.0, 1.2])
    tuned = imbalance_of_times(Vbs(), slowness, 160)
    fixed = imbalance_of_times(Vbs(autotune=False), slowness, 160)
    assert min(fixed) > 0.2
    assert max(tuned[-40:]) < 0.08  # a notch is 1.6 %, and a segment ends between samples


def test_even_ranks_are_left_alone() -> None:
    vbs = Vbs()
    w = heavy_tailed(4, 64)
    for step in range(40):
        vbs(w, RuntimeInfo(step=step, compute_ns=np.full((1, 4), 10**8) + np.arange(4) * 10**4))
        assert vbs.decision() is None or max(abs(x) for x in vbs.decision() or ()) <= 1


def test_a_correction_waits_until_the_last_one_shows() -> None:
    vbs, decided = Vbs(period=6), list[int]()
    for step in range(30):
        vbs(heavy_tailed(2, 8), RuntimeInfo(step=step, compute_ns=np.array([[100, 300]])))
        decided += [step] * (vbs.decision() is not None)
    assert decided == [6, 12, 18, 24]


@given(st.lists(st.integers(0, 10**10), min_size=1, max_size=9))
def test_shares_keep_their_mean_and_no_rank_starves(times: list[int]) -> None:
    share = np.full(len(times), 1 << 16)
    for _ in range(50):
        share = corrected(share, notches_from_times(np.array(times)))
        assert share.min() >= (1 << 16) // 64
        assert (1 << 16) * len(times) * 0.999 <= share.sum() <= (1 << 16) * len(times) * 1.001


def test_the_state_goes_on_where_it_was_saved() -> None:
    slow = np.array([[100, 150, 80]])
    whole, first, second = Vbs(), Vbs(), Vbs()
    for step in range(40):
        w, runtime = heavy_tailed(3, 64, seed=step), RuntimeInfo(step=step, compute_ns=slow)
        if step == 19:
            second.load_state_dict(json.loads(json.dumps(first.state_dict())))
        part = first if step < 19 else second
        assert (part(w, runtime) == whole(w, runtime)).all()
    assert len(set(whole.state_dict()["share"])) == 3
