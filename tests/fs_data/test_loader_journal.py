"""Runs whose plans follow measured times: recorded, replayed, rebuilt offline; and audits, which only watch."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fs_data import BalancedDataLoader, rebuild
from tests.fs_data.batches import Batch, Batches, check_batch, make_batch, rank_here
from tests.ranks import RankPool

Ranks = Callable[[int], RankPool]

SIZES = [[12, 9, 14, 11] * 10, [10, 13, 8, 12] * 10]
LEARNING = [{"cost": "calibrated"}, {"partitioner": "vbs", "cost": "power"}]


def balanced(**options: Any) -> BalancedDataLoader[Batch]:
    return BalancedDataLoader(Batches(SIZES[rank_here()]), timeout_s=20, **options)


def _run(options: dict[str, Any], seed: int) -> list[list[int]]:
    """The users of each batch, when ranks compute for times that differ from run to run."""
    rng = np.random.default_rng((seed, rank_here()))
    found: list[list[int]] = []
    with balanced(**options) as loader:
        for batch in loader:
            found.append(check_batch(batch))
            tokens = int(batch["seq"].lengths.sum())
            loader.record_compute(1e-3 * rng.uniform(0.5, 2) + 1e-4 * rng.uniform(0.2, 5) * tokens)
    return found


@pytest.mark.parametrize("learning", LEARNING)
def test_a_run_that_learned_from_times_replays_bit_for_bit(
    ranks: Ranks, tmp_path: Path, learning: dict[str, Any]
) -> None:
    journal = str(tmp_path / "plans")
    recorded = ranks(2).run(_run, learning | {"journal": journal}, 1)
    assert ranks(2).run(_run, learning, 2) != recorded, "other times must give other plans, or this proves nothing"
    assert ranks(2).run(_run, learning | {"replay": journal}, 2) == recorded
    assert Path(journal).stat().st_size < 200 * len(recorded[0])


@pytest.mark.parametrize("learning", LEARNING)
def test_any_batch_is_rebuilt_offline(ranks: Ranks, tmp_path: Path, learning: dict[str, Any]) -> None:
    journal = tmp_path / "plans"
    recorded = ranks(2).run(_run, learning | {"journal": str(journal)}, 3)
    for step in (0, 7, 23, 39):
        first = [1000 * r + sum(sizes[:step]) for r, sizes in enumerate(SIZES)]
        drawn = [make_batch(range(f, f + SIZES[r][step])) for r, f in enumerate(first)]
        rebuilt = rebuild(journal, step, drawn, **learning)
        assert [check_batch(batch) for batch in rebuilt] == [ids[step] for ids in recorded]


def test_other_batches_than_the_runs_are_noticed(ranks: Ranks, tmp_path: Path) -> None:
    journal = tmp_path / "plans"
    ranks(2).run(_run, {"journal": str(journal)}, 4)
    drawn = [make_batch(range(12)), make_batch(range(500, 510))]
    with pytest.raises(RuntimeError, match="batch 0 must have plan"):
        rebuild(journal, 0, drawn)


def _audit() -> tuple[list[list[int]], Any]:
    found: list[list[int]] = []
    with balanced(audit=True) as loader:
        for batch in loader:
            found.append(check_batch(batch))
            loader.record_compute(1e-3 + 1e-4 * int(batch["seq"].lengths.sum()))
        return found, loader.audit()


def test_an_audit_changes_nothing_and_predicts_what_balancing_would_save(ranks: Ranks) -> None:
    plain = [[check_batch(b) for b in Batches(SIZES[r], r)] for r in range(2)]
    (first, report), (second, other) = ranks(2).run(_audit)
    assert [first, second] == plain
    assert report == other
    assert report.steps > 20
    assert report.straggler_share > 0.05
    assert report.balanced_straggler_share < report.straggler_share / 2
    assert 0 < report.balanced_step_ms < report.step_ms


def test_without_an_audit_there_is_no_report() -> None:
    with BalancedDataLoader([{"x": torch.zeros(2)}]) as loader, pytest.raises(ValueError, match="audit=True"):
        loader.audit()
