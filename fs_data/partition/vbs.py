"""VBS, variable batch size (paper, section 4): sorted samples are cut into segments of equal weight, one a rank.

A rank's samples have similar lengths, so kernels that give a block to each sample finish together; counts differ, so
the loss needs `loss_scale`. AutoTune corrects what the weights get wrong: a rank that computes longer than the mean
gets less weight next time.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fs_data.partition.order import most_expensive_first
from fs_data.plan import Assignment, RuntimeInfo, WorldBatch

Ints = NDArray[np.int64]

_EVEN = 1 << 16
"""A share of one R-th of the weight, in the unit of shares."""
_NOTCHES = 64  # a notch is 1/64 of a share: about 1.6 %, since times are no truer than that
_MOST_NOTCHES = 16  # of one correction: no more than a quarter of a share at once


class Vbs:
    """Segments of the samples sorted by cost, from the dearest on rank 0 to the cheapest on the last rank.

    The weight of a sample is its cost: L^α with the cost model `power(alpha)`. Every rank gets at least one sample
    where there are enough.

    Args:
        autotune: Whether gathered compute times change the ranks' shares of the weight.
        period: Steps between corrections; more than it takes until a correction shows in the times known.
    """

    def __init__(self, *, autotune: bool = True, period: int = 8) -> None:
        if period < 1:
            raise ValueError(f"period must be at least 1 step, got {period}")
        self.autotune, self.period = autotune, period
        self._share: Ints = np.zeros(0, np.int64)  # (R,) with mean _EVEN
        self._next_step: int | None = None
        self._notches: Ints | None = None  # of the latest step

    def __call__(self, world: WorldBatch, runtime: RuntimeInfo) -> Assignment:
        if len(self._share) != world.world_size:
            self._share = np.full(world.world_size, _EVEN)
        if self.autotune:
            self._correct(runtime)
        return segments(world.cost, self._share)

    def decision(self) -> list[int] | None:
        """What the latest plan took from measured times, for a journal: a correction of each rank; None if nothing."""
        return None if self._notches is None else self._notches.tolist()

    def replay(self, decision: list[int] | None) -> None:
        """Takes the correction of the coming step from a journal; times are then left alone.

        A journal hands out all corrections since its run's first step, so shares loaded from a checkpoint are dropped.
        """
        if self.autotune:
            self.autotune, self._share = False, np.zeros(0, np.int64)
        if decision is not None:
            if not len(self._share):
                self._share = np.full(len(decision), _EVEN)
            self._share = corrected(self._share, np.asarray(decision, np.int64))

    def state_dict(self) -> dict[str, Any]:
        return {"share": self._share.tolist(), "next_step": -1 if self._next_step is None else self._next_step}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._share = np.asarray(state["share"], np.int64)
        self._next_step = None if state["next_step"] < 0 else state["next_step"]

    def _correct(self, runtime: RuntimeInfo) -> None:
        self._notches = None
        if not len(runtime.compute_ns):
            return
        if self._next_step is None:
            self._next_step = runtime.step + self.period  # the first times are those of warming up
        if runtime.step < self._next_step:
            return
        self._next_step = runtime.step + self.period
        notches = notches_from_times(runtime.compute_ns[-1])
        if notches.any():
            self._notches, self._share = notches, corrected(self._share, notches)


def segments(cost: Ints, share: Ints) -> Assignment:
    """`(N,)` destinations: rank r takes the r-th segment of the sorted samples, of about `share[r]`/Σshare of the cost.

    Args:
        cost: `(N,)`, at least 0.
        share: `(R,)`, at least 1.
    """
    num_samples, size = len(cost), len(share)
    order = most_expensive_first(cost)
    up_to = np.cumsum(cost[order])  # (N,) weight up to and with each sample
    total, whole = int(up_to[-1]) if num_samples else 0, int(share.sum())
    # Twice the weight: a sample belongs to the segment in which its middle lies. Python's integers do not overflow.
    wanted = np.array([2 * total * int(s) // whole for s in np.cumsum(share)[:-1]], np.int64)
    cut = np.searchsorted(2 * up_to - cost[order], wanted)  # (R − 1,) where the segments of ranks 1 … R − 1 begin
    if num_samples >= size:
        # At least one sample each: cut k lies between k + 1 and N − R + k + 1, beyond the cut before it.
        k = np.arange(size - 1)
        cut = np.minimum(np.maximum.accumulate(np.maximum(cut - k, 1)), num_samples - size + 1) + k
    destination = np.empty(num_samples, np.int64)
    destination[order] = np.searchsorted(cut, np.arange(num_samples), side="right")
    return destination


def notches_from_times(compute_ns: Ints) -> Ints:
    """`(R,)`: by how many notches of a share each rank's segment is to grow, from its time against the mean."""
    total, size = int(compute_ns.sum()), len(compute_ns)
    if total <= 0:
        return np.zeros(size, np.int64)
    notches = [(total - size * t) * _NOTCHES // total for t in compute_ns.tolist()]
    # Rounded down: towards less work, which AutoTune's normalisation evens out over the ranks.
    return np.clip(np.asarray(notches, np.int64), -_MOST_NOTCHES, _MOST_NOTCHES)


def corrected(share: Ints, notches: Ints) -> Ints:
    """`(R,)` shares after growing by `notches`, with mean 2^16 again; none sinks below a sixteenth of its part."""
    grown = np.maximum(share * (_NOTCHES + notches) // _NOTCHES, _EVEN // 16)
    return np.maximum(grown * (_EVEN * len(share)) // int(grown.sum()), 1)
