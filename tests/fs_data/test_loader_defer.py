"""Outlier delay: a sample that costs more than a rank's mean waits for others of its kind, but never for long."""

import io
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fs_data import BalancedDataLoader, JaggedColumn
from tests.fs_data.batches import rank_here
from tests.ranks import RankPool

Ranks = Callable[[int], RankPool]

# Lengths by rank and step. The samples of 1,000 are more than a rank's mean; in step 3 there are two at once.
LENGTHS = [
    [[10, 1000, 12], [11, 9], [14, 10], [1000, 10, 13], [10, 10], [12, 9]],
    [[13, 9, 11], [10, 12], [9, 11], [10, 1000, 8], [1000, 9, 10], [11, 10]],
]


class Lengths:
    """Batches of one-column samples: sample k of step s on rank r has id 1000·r + 10·s + k and the length given."""

    def __init__(self, lengths: Sequence[Sequence[int]]) -> None:
        self.lengths = lengths

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for step, lengths in enumerate(self.lengths):
            n = torch.tensor(lengths)
            ids = torch.arange(len(lengths)) + 1000 * rank_here() + 10 * step
            yield {"id": ids, "seq": JaggedColumn.from_lengths(ids.repeat_interleave(n), n)}


def make(defer: int) -> BalancedDataLoader[Any]:
    weights = {"tokens": lambda batch: batch["seq"].lengths}
    return BalancedDataLoader(
        Lengths(LENGTHS[rank_here()]), defer=defer, cost=lambda f: f.num_tokens, timeout_s=20, weights=weights
    )


def ids_of(batch: dict[str, Any]) -> list[int]:
    assert torch.equal(batch["seq"].values, batch["id"].repeat_interleave(batch["seq"].lengths))
    return batch["id"].tolist()


def _ids(defer: int) -> list[list[int]]:
    with make(defer) as loader:
        return [ids_of(batch) for batch in loader]


def _steps(found: list[list[list[int]]]) -> dict[int, int]:
    """The step in which each sample was trained on."""
    return {i: step for ids in found for step, batch in enumerate(ids) for i in batch}


def test_by_default_nothing_waits(ranks: Ranks) -> None:
    for sample, step in _steps(ranks(2).run(_ids, 0)).items():
        assert sample % 1000 // 10 == step


@pytest.mark.parametrize("defer", [1, 2, 5])
def test_outliers_wait_for_each_other_but_none_for_more_than_the_limit(ranks: Ranks, defer: int) -> None:
    found = ranks(2).run(_ids, defer)
    everyone = sorted(i for ids in found for batch in ids for i in batch)
    assert everyone == sorted(
        1000 * r + 10 * s + k for r, steps in enumerate(LENGTHS) for s, n in enumerate(steps) for k in range(len(n))
    )
    delay = {sample: step - sample % 1000 // 10 for sample, step in _steps(found).items()}
    assert all(d == 0 for sample, d in delay.items() if sample not in (1, 30, 1031, 1040))
    assert all(0 <= d <= defer for d in delay.values())
    if defer == 5:
        steps = _steps(found)
        assert steps[1] == 3, "the outlier of step 0 waits for those of step 3"


def _resume_everywhere(defer: int) -> int:
    whole: list[list[int]] = []
    scales: list[float] = []
    states: list[bytes] = []
    with make(defer) as loader:
        for batch in loader:
            whole.append(ids_of(batch))
            scales.append(loader.loss_scale(batch, "tokens"))
            data = io.BytesIO()
            torch.save(loader.state_dict(), data)
            states.append(data.getvalue())
    for done, state in enumerate(states, start=1):
        with make(defer) as loader:
            loader.load_state_dict(torch.load(io.BytesIO(state), weights_only=True))
            rest = [(ids_of(batch), loader.loss_scale(batch, "tokens")) for batch in loader]
        assert rest == list(zip(whole, scales, strict=True))[done:], f"after {done} batches"
        dist.barrier()
    return len(whole)


def test_samples_that_wait_are_in_the_state(ranks: Ranks) -> None:
    assert set(ranks(2).run(_resume_everywhere, 3)) == {6}
