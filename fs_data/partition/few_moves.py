"""Balance by few moves: start from where the samples are, and swap until the spread is small.

Plans that start from nothing move nearly every sample. Here only what must move does: first as many samples as it takes
for counts to differ by at most one, then pairs between the most and the least loaded rank.

Legend: N samples, R ranks.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fs_data.plan import Assignment, RuntimeInfo, WorldBatch

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class FewMoves:
    """Levels costs until the most loaded rank is at most `tolerance` above the mean, or no swap helps."""

    tolerance: float = 0.003
    """Imbalance, max/mean - 1, at which to stop. Less is fairer, and moves more bytes."""

    def __call__(self, world: WorldBatch, runtime: RuntimeInfo) -> Assignment:
        rank = world.rank.copy()
        if world.world_size == 1 or not len(rank):
            return rank
        _level_counts(rank, world)
        self._swap(rank, world)
        return rank

    def _swap(self, rank: Ints, world: WorldBatch) -> None:
        cost = world.cost
        by_rank = [_by_cost(np.flatnonzero(rank == r), cost) for r in range(world.world_size)]
        load = np.array([cost[samples].sum() for samples in by_rank], np.int64)
        filled = np.flatnonzero([len(samples) > 0 for samples in by_rank])  # fewer samples than ranks leave some empty
        total = int(load.sum())
        limit = total + int(self.tolerance * total)  # compared with load · R: integers alone decide
        for _ in range(len(rank)):  # each swap lowers the highest load, or ends the loop
            high, low = int(np.argmax(load)), int(filled[np.argmin(load[filled])])
            if int(load[high]) * world.world_size <= limit:
                return
            gap = int(load[high] - load[low])
            a, b = _best_pair(by_rank[high], by_rank[low], cost, gap)
            gain = int(cost[a] - cost[b])
            if not 0 < gain < gap:
                return
            rank[a], rank[b] = low, high
            load[high] -= gain
            load[low] += gain
            by_rank[high] = _by_cost(np.append(by_rank[high][by_rank[high] != a], b), cost)
            by_rank[low] = _by_cost(np.append(by_rank[low][by_rank[low] != b], a), cost)


def _best_pair(high: Ints, low: Ints, cost: Ints, gap: int) -> tuple[int, int]:
    """The samples whose swap brings the two loads closest to each other; both lists sorted by cost."""
    wanted = cost[high] - gap // 2
    place = np.searchsorted(cost[low], wanted)
    best: tuple[int, int] = (int(high[0]), int(low[0]))
    distance = -1
    for candidate in (np.maximum(place - 1, 0), np.minimum(place, len(low) - 1)):
        off = np.abs(cost[low][candidate] - wanted)
        k = int(np.argmin(off))
        if distance < 0 or int(off[k]) < distance:
            distance, best = int(off[k]), (int(high[k]), int(low[candidate[k]]))
    return best


def _level_counts(rank: Ints, world: WorldBatch) -> None:
    """Moves samples from ranks with too many to ranks with too few; the cheapest to send go first."""
    count = np.bincount(rank, minlength=world.world_size)
    least, extra = divmod(len(rank), world.world_size)
    # The ranks that may keep one more are those that have the most, so that fewest samples move.
    wanted = np.full(world.world_size, least, np.int64)
    wanted[np.argsort(-count, kind="stable")[:extra]] += 1
    if not (count > wanted).any():
        return
    takers = np.repeat(np.arange(world.world_size), np.maximum(wanted - count, 0))
    givers = np.flatnonzero(count > wanted)
    spare: list[Ints] = []
    for r in givers:
        samples = np.flatnonzero(rank == r)
        cheap = samples[np.argsort(world.num_bytes[samples], kind="stable")]
        spare.append(cheap[: count[r] - wanted[r]])
    rank[np.concatenate(spare)] = takers


def _by_cost(samples: Ints, cost: Ints) -> Ints:
    samples = np.sort(samples)
    return samples[np.argsort(cost[samples], kind="stable")]
