"""Audit: measured figures are those of the times, and predictions those of a job whose law is known."""

import numpy as np
import pytest

from fs_data.audit import Auditor
from fs_data.cost import Linear, rank_sums
from fs_data.partition import FewMoves, identity
from fs_data.planner import Planner
from fs_data.shuffle_plan import Plan
from tests.fs_data.test_cost import features

R, B = 8, 16


def plans(step: int) -> tuple[Plan, Plan]:
    """The step's batch as dealt and as balanced by length."""
    drawn = np.random.default_rng(step).lognormal(np.log(3500), 0.9, R * B).clip(1, 21_000).astype(np.int64)
    f = features(drawn, num_ranks=R)
    none = np.full(R, -1)
    return tuple(  # pyright: ignore[reportReturnType]
        Planner(p, Linear(), world_size=R).plan(step, f, none, np.zeros((R, 4), np.int64))
        for p in (identity, FewMoves())
    )


def job(
    noise: float, seed: int = 0, law: tuple[float, float, float] = (20e6, 900.0, 0.0)
) -> tuple[Auditor, float, float]:
    """An audited job, the mean step as dealt, and the mean step that balancing then really gives, in ms."""
    rng = np.random.default_rng(seed)
    auditor, dealt_ms, balanced_ms = Auditor(warm_up=0), [], []
    for step in range(60):
        dealt, balanced = plans(step)
        time, other = (rank_sums(p) @ np.asarray(law) * rng.lognormal(0, noise, R) for p in (dealt, balanced))
        auditor.observe(dealt, balanced, np.rint(time).astype(np.int64))
        dealt_ms.append(time.max() / 1e6)
        balanced_ms.append(other.max() / 1e6)
    return auditor, float(np.mean(dealt_ms)), float(np.mean(balanced_ms))


@pytest.mark.parametrize("noise", [0.0, 0.02, 0.1])
def test_the_predicted_step_is_the_one_that_balancing_gives(noise: float) -> None:
    auditor, dealt_ms, balanced_ms = job(noise)
    report = auditor.report()
    assert report.step_ms == pytest.approx(dealt_ms)
    assert report.balanced_step_ms == pytest.approx(balanced_ms, rel=0.02 + noise / 4)
    assert report.saved_share == pytest.approx(1 - balanced_ms / dealt_ms, abs=0.02)
    assert report.balanced_straggler_share < report.straggler_share
    assert report.unexplained_share == pytest.approx(noise, abs=0.02)


def test_where_times_do_not_depend_on_lengths_nothing_is_promised() -> None:
    report = job(0.05, law=(80e6, 0.0, 0.0))[0].report()
    assert abs(report.saved_share) < 0.01
    assert report.bytes_moved_share > 0


def test_straggler_share_is_the_mean_idle_time_over_the_step() -> None:
    dealt, balanced = plans(0)
    auditor = Auditor(warm_up=0)
    auditor.observe(dealt, balanced, np.array([100, 50, 50, 50, 50, 50, 50, 50]) * 10**6)
    report = auditor.report()
    assert report.step_ms == pytest.approx(100)
    assert report.straggler_share == pytest.approx(7 * 50 / 8 / 100)


def test_the_warm_up_and_what_left_the_window_do_not_count() -> None:
    auditor = Auditor(warm_up=2, window=3)
    for step, ms in enumerate((900, 900, 500, 10, 10, 10)):
        auditor.observe(*plans(step), np.full(R, ms * 10**6))
    assert auditor.report().steps == 3
    assert auditor.report().step_ms == pytest.approx(10)


def test_without_times_the_audit_says_how_to_get_them() -> None:
    with pytest.raises(ValueError, match=r"attach\(model, optimizer\) or record_compute"):
        Auditor().report()
