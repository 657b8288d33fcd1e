"""Journal: short, readable after a crash, and enough to plan as a run did whose plans depended on measured times."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fs_data import Disagreement, LoaderError
from fs_data.cost import Calibrated, Linear, rank_sums
from fs_data.journal import Journal, Replay
from fs_data.partition import make
from fs_data.planner import LAG, Planner
from fs_data.shuffle_plan import Features, Plan
from tests.fs_data.test_cost import features

STEPS = 60


def batch(step: int, num_ranks: int) -> Features:
    drawn = np.random.default_rng((step, 7)).lognormal(np.log(3500), 0.9, num_ranks * 6).clip(1, 21_000)
    return features(drawn.astype(np.int64), num_ranks=num_ranks)


def learners() -> tuple[Any, Any]:
    return make("vbs", period=5), Calibrated(Linear(), warm_up=2, min_steps=3, refit_every=7, freeze_after=40)


def run(path: Path, num_ranks: int, steps: range = range(STEPS), seed: int = 0) -> dict[int, int]:
    """A run with live calibration and AutoTune on noisy times, journaled; its plans' fingerprints by step."""
    partition, cost = learners()
    planner = Planner(partition, cost, world_size=num_ranks)
    journal = Journal(path, world_size=num_ranks, settings="vbs, calibrated")
    rng, found = np.random.default_rng(seed), dict[int, Plan]()
    for step in steps:
        old = found.get(step - LAG)
        pace = rng.uniform(0.8, 1.3, num_ranks)
        times = np.full(num_ranks, -1) if old is None else rank_sums(old) @ np.array([4e6, 150, 0.02]) * pace
        coefficients = np.tile(np.r_[planner.coefficients(), 0], (num_ranks, 1))
        found[step] = planner.plan(step, batch(step, num_ranks), np.rint(times).astype(np.int64), coefficients)
        journal.record(step, found[step], partition, cost, batch=step)
    journal.close()
    return {step: plan.fingerprint for step, plan in found.items()}


def replan(replay: Replay, step: int, partition: Any, cost: Any, num_ranks: int) -> Plan:
    """Plans `step` as the run did, without any times."""
    replay.before(step, partition, cost)
    f = batch(step, num_ranks)
    none = np.full(num_ranks, -1)
    coefficients = np.tile(np.r_[cost._used, 0], (num_ranks, 1))  # what the header of the run carried
    return Planner(partition, cost, world_size=num_ranks).plan(step, f, none, coefficients)


@pytest.mark.parametrize("num_ranks", [3, 40])
def test_a_run_that_learned_from_times_is_replayed_bit_for_bit(tmp_path: Path, num_ranks: int) -> None:
    fingerprints = run(tmp_path / "j", num_ranks)
    other = run(tmp_path / "other", num_ranks, seed=1)
    assert other != fingerprints, "times made no difference, so replaying would prove nothing"
    replay, (partition, cost) = Replay(tmp_path / "j", world_size=num_ranks), learners()
    for step in range(STEPS):
        plan = replan(replay, step, partition, cost, num_ranks)
        replay.check(step, plan)
        assert plan.fingerprint == fingerprints[step]


def test_a_resumed_run_is_replayed_from_its_checkpoint_on(tmp_path: Path) -> None:
    fingerprints = run(tmp_path / "j", 4)
    replay, (partition, cost) = Replay(tmp_path / "j"), learners()
    planner = Planner(partition, cost, world_size=4, replay=replay)
    partition.load_state_dict({"share": [1 << 15, 1 << 16, 1 << 16, 3 << 15], "next_step": 30})  # of the checkpoint
    for step in range(30, STEPS):
        plan = planner.plan(step, batch(step, 4), np.full(4, 10**8), np.zeros((4, 4), np.int64))
        assert plan.fingerprint == fingerprints[step]


@pytest.mark.parametrize("step", [0, 17, STEPS - 1])
def test_any_one_step_is_planned_again_from_the_journal(tmp_path: Path, step: int) -> None:
    fingerprints = run(tmp_path / "j", 5)
    replay = Replay(tmp_path / "j")
    assert replan(replay, step, *learners(), 5).fingerprint == fingerprints[step]
    assert replay.before(step, None, None).batch == step


@pytest.mark.parametrize("num_ranks", [2, 256])
def test_a_step_takes_less_than_200_bytes(tmp_path: Path, num_ranks: int) -> None:
    run(tmp_path / "j", num_ranks, range(10**9, 10**9 + STEPS))
    lines = (tmp_path / "j").read_text().splitlines()
    assert len(lines) == 1 + STEPS
    assert sum(len(line) + 1 for line in lines[1:]) < 200 * STEPS


class Corrects:
    """Takes the same correction from times at every step."""

    def __init__(self) -> None:
        self.replayed: list[list[int] | None] = []

    def decision(self) -> list[int]:
        return [1, -1]

    def replay(self, decision: list[int] | None) -> None:
        self.replayed.append(decision)


def test_equal_corrections_count_each_time_and_coefficients_stand_until_they_change(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "j", world_size=3, settings="")
    plan = Planner(make("fbs"), Linear(), world_size=3).plan(0, batch(0, 3), np.full(3, -1), np.zeros((3, 4), np.int64))
    for step in range(3):
        journal.record(step, plan, Corrects(), Corrects())
    journal.close()
    assert [line.count("[1,-1]") for line in (tmp_path / "j").read_text().splitlines()] == [0, 2, 1, 1]
    partition, cost = Corrects(), Corrects()
    Replay(tmp_path / "j").before(2, partition, cost)
    assert partition.replayed == cost.replayed == [[1, -1]] * 3


def test_after_a_restart_a_steps_last_entry_counts(tmp_path: Path) -> None:
    run(tmp_path / "j", 3, range(20))
    again = run(tmp_path / "j", 3, range(10, 15), seed=3)
    replay = Replay(tmp_path / "j")
    assert [e.step for e in replay.entries] == list(range(15))
    assert {e.step: e.fingerprint for e in replay.entries[10:]} == again


def test_a_line_cut_short_by_a_crash_is_left_out_and_overwritten(tmp_path: Path) -> None:
    run(tmp_path / "j", 3, range(4))
    whole = (tmp_path / "j").read_text()
    (tmp_path / "j").write_text(whole[:-9])
    assert [e.step for e in Replay(tmp_path / "j").entries] == [0, 1, 2]
    run(tmp_path / "j", 3, range(3, 4))
    assert [e.step for e in Replay(tmp_path / "j").entries] == [0, 1, 2, 3]


def test_other_samples_than_the_runs_are_noticed(tmp_path: Path) -> None:
    run(tmp_path / "j", 3, range(4))
    replay, (partition, cost) = Replay(tmp_path / "j"), learners()
    with pytest.raises(Disagreement, match=r"batch 2 must have plan \w{16}.*'vbs, calibrated'"):
        replay.check(2, replan(replay, 3, partition, cost, 3))


def test_what_is_not_the_journal_asked_for_is_refused_by_name(tmp_path: Path) -> None:
    run(tmp_path / "j", 3, range(4))
    with pytest.raises(LoaderError, match="world_size 4, it has 3"):
        Journal(tmp_path / "j", world_size=4, settings="vbs, calibrated")
    with pytest.raises(LoaderError, match="settings 'fbs', it has 'vbs, calibrated'"):
        Replay(tmp_path / "j", settings="fbs")
    with pytest.raises(LoaderError, match="must hold batch 4 to replay it, but its batches are 0 to 3"):
        Replay(tmp_path / "j").before(4, None, None)
    (tmp_path / "text").write_text("hello\nworld\n")
    with pytest.raises(LoaderError, match="line 1 is not JSON"):
        Replay(tmp_path / "text")
