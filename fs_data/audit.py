"""Audit mode: measures what stragglers cost a running job, and predicts what balancing would save, changing nothing.

Ranks compute on their samples as dealt and report their times. Times are explained by the lengths of the samples (the
fit of the calibrated cost model); what the fit leaves over, a factor for each rank and step, is taken as that rank's
own pace in that step, and would be there with other samples too. So a rank's time on a balanced batch is predicted as
the fit's time for the samples it would have had, times the same factor.
"""

from collections import deque
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fs_data.cost import Moments, rank_sums
from fs_data.shuffle_plan import Plan

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True, slots=True)
class AuditReport:
    """Means over the steps seen. A step lasts as long as its slowest rank computes; shares are of 1."""

    steps: int
    step_ms: float
    """As dealt, measured."""
    straggler_share: float
    """As dealt, measured: how much of the step a rank waits for the slowest, in the mean over ranks."""
    balanced_step_ms: float
    """Predicted with balancing."""
    balanced_straggler_share: float
    """Predicted with balancing."""
    saved_share: float
    """Predicted: of the time of a step's computation."""
    bytes_moved_share: float
    """What balancing would move, of all bytes."""
    unexplained_share: float
    """Spread of measured times around the fit, relative: where it is large, lengths do not decide, and balancing by
    them helps little."""

    def line(self) -> str:
        """For a log."""
        return (
            f"{self.steps} steps: {self.step_ms:.1f} ms with {self.straggler_share:.1%} lost to stragglers; balanced "
            f"they would take {self.balanced_step_ms:.1f} ms with {self.balanced_straggler_share:.1%} "
            f"({self.saved_share:.1%} saved, {self.bytes_moved_share:.1%} of bytes moved, "
            f"{self.unexplained_share:.1%} unexplained by lengths)"
        )


@dataclass(frozen=True)
class _Step:
    dealt: Ints
    """`(R, 3)`: 1, ΣL, ΣL² of each rank."""
    balanced: Ints
    compute_ns: Ints
    """`(R,)`."""
    moved: int
    num_bytes: int


class Auditor:
    """Collects steps; the same on every rank, since times and lengths are gathered.

    Args:
        window: Latest steps that the report is about; their figures are kept, 56 bytes for each rank and step.
        warm_up: Steps to leave out at first: compilation and caches make them slow.
    """

    def __init__(self, *, window: int = 200, warm_up: int = 5) -> None:
        if window < 1 or warm_up < 0:
            raise ValueError(f"window must be at least 1 and warm_up at least 0, got {window} and {warm_up}")
        self._steps: deque[_Step] = deque(maxlen=window)
        self._to_skip = warm_up

    def observe(self, dealt: Plan, balanced: Plan, compute_ns: Ints) -> None:
        """Adds a step: the plan that ran and left samples as dealt, the one that balancing would give, the times."""
        if self._to_skip:
            self._to_skip -= 1
            return
        self._steps.append(
            _Step(
                rank_sums(dealt),
                rank_sums(balanced),
                compute_ns,
                int(balanced.traffic()[0].sum()),
                int(balanced.features.num_bytes.sum()),
            )
        )

    def report(self) -> AuditReport:
        """May be called from any thread. Raises ValueError before there is a step."""
        steps = list(self._steps)
        if not steps:
            raise ValueError(
                "an audit needs measured steps: attach(model, optimizer) or record_compute(seconds) on every rank, and "
                "a few steps more than the warm-up"
            )
        time = np.stack([s.compute_ns for s in steps]).astype(np.float64)  # (S, R)
        dealt, balanced = (np.stack([getattr(s, n) for s in steps]) for n in ("dealt", "balanced"))  # (S, R, 3)
        moments = Moments()
        moments.add(dealt.reshape(-1, 3), np.concatenate([s.compute_ns for s in steps]))
        coefficients = moments.fit()
        fitted = np.maximum(dealt @ coefficients, 1.0)
        pace = time / fitted
        predicted = balanced @ coefficients * pace
        return AuditReport(
            steps=len(steps),
            step_ms=float(time.max(1).mean()) / 1e6,
            straggler_share=_straggler_share(time),
            balanced_step_ms=float(predicted.max(1).mean()) / 1e6,
            balanced_straggler_share=_straggler_share(predicted),
            saved_share=1 - float(predicted.max(1).sum()) / max(float(time.max(1).sum()), 1.0),
            bytes_moved_share=sum(s.moved for s in steps) / max(sum(s.num_bytes for s in steps), 1),
            unexplained_share=float(np.sqrt(np.mean((pace - 1) ** 2))),
        )


def _straggler_share(time: Floats) -> float:
    """Idle time of ranks over the time of steps, for times `(S, R)`: the paper's straggler percentage."""
    return 1 - float(time.mean(1).sum()) / max(float(time.max(1).sum()), 1.0)
