"""The figures by which a plan is judged, computed from the plan alone."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fs_data.plan import Assignment, WorldBatch


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanReport:
    """Shares are of 1: 0.01 is 1 %."""

    imbalance_before: float
    """Costs of ranks as dealt, max/mean − 1: how much longer the busiest rank computes than the average one."""
    imbalance: float
    """The same after the plan."""
    bound: float
    """What no plan can beat: the most expensive sample against a rank's mean, max(0, cost/mean − 1)."""
    bytes_moved_share: float
    """Bytes that change rank over all bytes."""
    busiest_rank_bytes: float
    """The most that one rank sends or receives, in mean batches (bytes of all samples over ranks)."""
    peak_tokens: float
    """Most tokens of a rank over the mean after the plan: activation memory grows with it."""
    most_samples: int
    """Of a rank."""
    fewest_samples: int


def report(world: WorldBatch, destination: Assignment) -> PlanReport:
    """How good the plan is, what it moves, and what it does to memory."""
    size = world.world_size
    after = sum_by_rank(destination, world.cost, size)
    moved = np.where(destination != world.rank, world.num_bytes, 0)
    traffic = np.maximum(sum_by_rank(world.rank, moved, size), sum_by_rank(destination, moved, size))
    total_bytes = int(world.num_bytes.sum())
    counts = np.bincount(destination, minlength=size)
    mean_cost = int(world.cost.sum()) / size
    return PlanReport(
        imbalance_before=over_mean(sum_by_rank(world.rank, world.cost, size)) - 1,
        imbalance=over_mean(after) - 1,
        bound=max(0.0, int(world.cost.max(initial=0)) / mean_cost - 1) if mean_cost else 0.0,
        bytes_moved_share=int(moved.sum()) / total_bytes if total_bytes else 0.0,
        busiest_rank_bytes=int(traffic.max()) * size / total_bytes if total_bytes else 0.0,
        peak_tokens=over_mean(sum_by_rank(destination, world.num_tokens, size)),
        most_samples=int(counts.max()),
        fewest_samples=int(counts.min()),
    )


def sum_by_rank(rank: NDArray[np.int64], amount: NDArray[np.int64], world_size: int) -> NDArray[np.int64]:
    """`(R,)` int64 sums; exact, where `np.bincount` with weights would round to float64."""
    total = np.zeros(world_size, np.int64)
    np.add.at(total, rank, amount)
    return total


def over_mean(amount: NDArray[np.int64]) -> float:
    """max/mean; 1 where all are 0."""
    total = int(amount.sum())
    return int(amount.max()) * len(amount) / total if total else 1.0
