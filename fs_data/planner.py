"""From gathered numbers to a plan: costs, groups, who waits, the partition function, copies for ranks left empty.

Legend: N samples of all ranks, R ranks, U units (groups, or single samples), M places (samples that are trained on in
this step, and copies).
"""

from collections import deque
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fs_data.audit import Auditor
from fs_data.cost import CostModel
from fs_data.errors import LoaderError
from fs_data.journal import Journal, Replay
from fs_data.partition import Partitioner
from fs_data.plan import RuntimeInfo, WorldBatch
from fs_data.shuffle_plan import Features, Plan

Ints = NDArray[np.int64]

LAG = 4
"""The times that travel with batch i are those of batch i − 4: batch i is planned during step i − 2, and a GPU may
still be at work on the step before that one."""

_HISTORY = 64  # steps of compute times that partition functions see


class Planner:
    """Holds the partition function and the cost model, and what they remember from step to step.

    Either may have `observe(plan, compute_ns)`, called with the plan of an earlier step and the times `(R,)` that ranks
    then computed for, and `state_dict`/`load_state_dict`. A cost model may have `coefficients()` and
    `adopt(coefficients)`: up to four integers, of which rank 0's are used by all ranks.
    """

    def __init__(
        self,
        partition: Partitioner,
        cost: CostModel,
        *,
        world_size: int,
        host: Ints | None = None,
        max_wait: int = 0,
        auditor: Auditor | None = None,
        journal: Journal | None = None,
        replay: Replay | None = None,
    ) -> None:
        self.partition, self.cost, self.max_wait = partition, cost, max_wait
        self.world_size, self.host = world_size, np.zeros(0, np.int64) if host is None else host
        self.auditor, self.journal, self.replay = auditor, journal, replay
        self._compute_ns: deque[Ints] = deque(maxlen=_HISTORY)
        self._plans: dict[int, Plan] = {}  # by step, those whose times are still to come

    def coefficients(self) -> Ints:
        """This rank's cost coefficients; those of rank 0 are used by all."""
        found = self.cost.coefficients() if hasattr(self.cost, "coefficients") else ()  # pyright: ignore
        return np.asarray(found, np.int64)

    def plan(
        self,
        step: int,
        features: Features,
        compute_ns: Ints,
        coefficients: Ints,
        *,
        batch: int | None = None,
        is_last: bool = False,
    ) -> Plan:
        """The same plan on every rank, from gathered numbers.

        Args:
            step: Counts the loader's batches.
            compute_ns: `(R,)` times of step − LAG; −1 where a rank has none.
            coefficients: `(R, 4)`.
            batch: Counts the batches of a pass, for the journal.
            is_last: No rank's loader has more, so nothing may wait.
        """
        num_samples = len(features.rank)
        if not num_samples:
            raise LoaderError(f"batch {step} is empty on every rank; at least one rank's loader must give samples")
        self._observe(step - LAG, compute_ns)
        if self.replay is not None:
            self.replay.before(step, self.partition, self.cost)
        elif hasattr(self.cost, "adopt"):
            self.cost.adopt(coefficients[0])  # pyright: ignore
        cost = _as_ints(self.cost(features), "cost", num_samples)
        if (cost < 0).any() or cost.astype(np.float64).sum() >= 1 << 62:
            raise LoaderError(
                f"cost must be at least 0 and sum to less than 2^62, got {cost.min()} to {cost.max()} for each of "
                f"{num_samples} samples"
            )
        history = np.stack(self._compute_ns) if self._compute_ns else np.zeros((0, self.world_size), np.int64)
        runtime = RuntimeInfo(step=step, host=self.host, compute_ns=history)
        plan = self._complete(features, cost, self._assign(features, cost, runtime, is_last))
        if self.replay is not None:
            self.replay.check(step, plan)
        if self.journal is not None:
            self.journal.record(step, plan, self.partition, self.cost, batch=batch)
        self._plans[step] = plan
        return plan if self.auditor is None else self._complete(features, cost, features.rank)

    def state_dict(self) -> dict[str, Any]:
        """What the partition function and the cost model remember; empty where they remember nothing."""
        owners = {"partition": self.partition, "cost": self.cost}
        return {name: o.state_dict() for name, o in owners.items() if hasattr(o, "state_dict")}  # pyright: ignore

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, owner in (("partition", self.partition), ("cost", self.cost)):
            if name in state:
                owner.load_state_dict(state[name])  # pyright: ignore
        self._plans.clear()
        self._compute_ns.clear()

    def _observe(self, step: int, compute_ns: Ints) -> None:
        plan = self._plans.pop(step, None)
        if plan is None or (compute_ns < 0).any():
            return
        self._compute_ns.append(compute_ns)
        if self.auditor is not None:
            dealt = self._complete(plan.features, plan.cost, plan.features.rank)
            self.auditor.observe(dealt, plan, compute_ns)
        elif self.replay is None:
            for owner in (self.partition, self.cost):
                if hasattr(owner, "observe"):
                    owner.observe(plan, compute_ns)  # pyright: ignore

    def _assign(self, features: Features, cost: Ints, runtime: RuntimeInfo, is_last: bool) -> Ints:
        """`(N,)` destinations, −1 for samples that wait; groups go to the partition function as one unit each."""
        unit, rank = _units(features)
        amounts = [_sum_by(unit, x) for x in (cost, features.num_tokens, features.num_bytes, np.ones_like(unit))]
        world = _world(self.world_size, rank, *amounts)
        destination = np.full(len(rank), -1)
        now = np.flatnonzero(~self._waits(world, unit, features.age, is_last))
        subset = _world(self.world_size, rank[now], *(x[now] for x in amounts))
        destination[now] = self.partition(subset, runtime)
        return destination[unit]

    def _waits(self, world: WorldBatch, unit: Ints, age: Ints | None, is_last: bool) -> NDArray[np.bool_]:
        """`(U,)`: which units wait for a later step (WLB-LLM's outlier delay); none for longer than `max_wait`.

        A unit that alone costs more than a rank's mean makes all others wait, wherever it goes. Once there is one for
        each rank, they make a step of their own.
        """
        nobody = np.zeros(len(world.rank), np.bool_)
        if not self.max_wait or is_last or age is None:
            return nobody
        unit_age = np.zeros(len(world.rank), np.int64)
        np.maximum.at(unit_age, unit, age)
        outlier = world.cost > world.cost.sum() // world.world_size
        waits = outlier & (unit_age < self.max_wait)
        enough_remain = len(waits) - waits.sum() >= world.world_size
        return waits if outlier.sum() < world.world_size and enough_remain else nobody

    def _complete(self, features: Features, cost: Ints, destination: Ints) -> Plan:
        """Adds a copy of the cheapest sample to each rank that has none: an empty batch would make a NaN loss."""
        now = np.flatnonzero(destination >= 0)
        empty = np.flatnonzero(np.bincount(destination[now], minlength=self.world_size) == 0)
        sample = np.r_[now, np.full(len(empty), now[cost[now].argmin()])]
        destination = np.r_[destination[now], empty]
        is_copy = np.arange(len(sample)) >= len(now)
        order = np.lexsort((sample, destination))
        return Plan(
            world_size=self.world_size,
            sample=sample[order],
            destination=destination[order],
            is_copy=is_copy[order],
            features=features,
            cost=cost,
        )


def _world(world_size: int, rank: Ints, cost: Ints, num_tokens: Ints, num_bytes: Ints, num_samples: Ints) -> WorldBatch:
    return WorldBatch(
        world_size=world_size,
        rank=rank,
        cost=cost,
        num_tokens=num_tokens,
        num_bytes=num_bytes,
        num_samples=num_samples if (num_samples > 1).any() else None,
    )


def _units(features: Features) -> tuple[Ints, Ints]:
    """`(N,)` unit of each sample, and `(U,)` rank of each unit: that of its first sample, so non-decreasing."""
    if features.group is None:
        return np.arange(len(features.rank)), features.rank
    _, first, inverse = np.unique(features.group, return_index=True, return_inverse=True)
    order = np.argsort(first)
    position = np.empty_like(order)
    position[order] = np.arange(len(order))
    return position[inverse.ravel()], features.rank[first[order]]


def _sum_by(unit: Ints, amount: Ints) -> Ints:
    total = np.zeros(int(unit.max()) + 1, np.int64)
    np.add.at(total, unit, amount)
    return total


def _as_ints(value: Any, name: str, size: int) -> Ints:
    array = np.asarray(value)
    if array.shape != (size,) or not np.issubdtype(array.dtype, np.integer):
        raise LoaderError(f"{name} must give ({size},) integers, got {array.shape} {array.dtype}")
    return array.astype(np.int64)
