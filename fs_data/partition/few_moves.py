"""Balances by moving little: starts from where the samples are, evens out the counts, then swaps pairs.

Sorting plans start from nothing and so move nearly every byte. Here only what a rank has too much of leaves it.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fs_data.partition.compiled import quickest
from fs_data.partition.swaps import HELPERS, level_counts, swap_pairs
from fs_data.plan import Assignment, RuntimeInfo, WorldBatch

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class FewMoves:
    """Counts differ by at most one, and no rank's cost is over (1 + `tolerance`) of the mean where that is possible.

    Where one sample alone costs more than a rank's mean, the limit is that sample's cost and the same slack. With
    counts as even as dealt, no plan is worse than as dealt. Of samples with equal costs, the first stays longest.
    """

    tolerance: float = 0.003
    """Of a rank's mean cost. A smaller one moves more bytes: the spread that is left costs at most this share."""

    def __post_init__(self) -> None:
        if not 0 <= self.tolerance < 1:
            raise ValueError(f"tolerance must be at least 0 and less than 1 (0.01 is 1 %), got {self.tolerance}")

    def __call__(self, world: WorldBatch, runtime: RuntimeInfo) -> Assignment:
        if not len(world.cost):
            return world.rank.copy()
        size = world.world_size
        count = np.bincount(world.rank, minlength=size)
        target = target_counts(count)
        destination = world.rank.copy()
        if (count != target).any():
            level = quickest(level_counts, num_samples=len(world.cost))
            level(world.cost, destination, count.astype(np.int64), target)
        order = np.argsort(destination, kind="stable")  # (N,) rank after rank
        start = np.r_[0, np.cumsum(target)]  # (R + 1,)
        cost = world.cost[order]
        load = np.add.reduceat(cost, start[:-1]) if target.min() else _sums(cost, start)
        total, parts = int(cost.sum()), round(self.tolerance * 1e9)
        slack = total * parts // (size * 10**9)
        # Mean and slack are rounded together: rounded down one by one, small costs would be moved within the tolerance.
        ceiling = max(total * (10**9 + parts) // (size * 10**9), int(cost.max()) + slack)
        is_sorted = np.zeros(size, np.bool_)
        swap = quickest(swap_pairs, *HELPERS, num_samples=len(cost))
        for ranks in [*_hosts(runtime.host, size), np.arange(size)]:
            across = len(ranks) == size
            swap(cost, order, start, load, is_sorted, ranks, ceiling, slack if across else -1)
        destination[order] = np.repeat(np.arange(size), target)
        return destination


def target_counts(count: Ints) -> Ints:
    """`(R,)`: ⌊N/R⌋ or ⌈N/R⌉ samples a rank; the more goes to ranks that hold most now, ties to the lower rank."""
    base, rest = divmod(int(count.sum()), len(count))
    target = np.full(len(count), base, np.int64)
    target[np.argsort(-count, kind="stable")[:rest]] += 1
    return target


def _hosts(host: Ints, size: int) -> list[Ints]:
    """The ranks of each host that has several, where there are several hosts: swaps there leave the network alone."""
    groups = [np.flatnonzero(host == h) for h in np.unique(host)]
    return [ranks for ranks in groups if 1 < len(ranks) < size]


def _sums(cost: Ints, start: Ints) -> Ints:
    return np.diff(np.r_[0, np.cumsum(cost)][start])
