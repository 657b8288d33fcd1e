"""The loops of few_moves, in the part of Python that numba compiles.

Legend: N samples, R ranks. A rank's samples are one run of flat arrays, `start[r]` to `start[r + 1]`; runs are sorted
by cost once they are needed, ties by global index.
"""

import heapq

import numpy as np
from numpy.typing import NDArray

from fs_data.partition.compiled import Int

Ints = NDArray[np.int64]

_PATIENCE = 16  # receivers that a donor tries; the least loaded has the most room, so more seldom help


def level_counts(cost: Ints, destination: Ints, count: Ints, target: Ints) -> None:
    """Moves samples, by `destination` (N,) in place, until each rank has its `target` (R,) number of them.

    The rank with the least cost takes next, from the rank with the most that has samples to spare, the sample whose
    cost is nearest to what the taker lacks for each sample that it lacks.
    """
    size = len(count)
    load = np.zeros(size, np.int64)
    for s in range(len(cost)):
        load[destination[s]] += cost[s]
    mean = cost.sum() // size
    order = np.argsort(destination, kind="mergesort")
    start = np.zeros(size + 1, np.int64)
    start[1:] = np.cumsum(count)
    missing = target - count
    left = count.copy()  # samples still in a donor's run
    takers = [(load[r], r) for r in range(size) if missing[r] > 0]
    donors = [(-load[r], r) for r in range(size) if missing[r] < 0]
    for _, r in donors:
        run = order[start[r] : start[r + 1]]
        order[start[r] : start[r + 1]] = run[np.argsort(cost[run], kind="mergesort")]
    heapq.heapify(takers)
    heapq.heapify(donors)
    while len(takers) > 0:
        b, a = takers[0][1], donors[0][1]
        run = order[start[a] : start[a] + left[a]]
        wanted = (mean - load[b]) // missing[b]
        i = np.searchsorted(cost[run], wanted)
        if i == len(run) or (i > 0 and wanted - cost[run[i - 1]] <= cost[run[i]] - wanted):
            i -= 1
        s = run[i]
        run[i:-1] = run[i + 1 :].copy()
        left[a] -= 1
        destination[s] = b
        load[a] -= cost[s]
        load[b] += cost[s]
        missing[a] += 1
        missing[b] -= 1
        if missing[b] > 0:
            heapq.heapreplace(takers, (load[b], b))
        else:
            heapq.heappop(takers)
        if missing[a] < 0:
            heapq.heapreplace(donors, (-load[a], a))
        else:
            heapq.heappop(donors)


def swap_pairs(
    cost: Ints,
    sample: Ints,
    start: Ints,
    load: Ints,
    is_sorted: NDArray[np.bool_],
    ranks: Ints,
    ceiling: Int,
    slack: Int,
) -> None:
    """Swaps samples between `ranks` in place until none has a `load` over `ceiling`, or no swap helps the highest.

    Args:
        cost: `(N,)` by run.
        sample: `(N,)` global index by run.
        load: `(R,)` sums of the runs.
        is_sorted: `(R,)`, which runs are.
        slack: What `ceiling` allows over the mean. At least 0, ranks may also pass `ceiling` as long as the highest
            load sinks by a good part of `slack`; −1, a rank takes only what keeps it under `ceiling`.
    """
    donors = [(-load[r], r) for r in ranks]
    takers = [(load[r], r) for r in ranks]
    heapq.heapify(donors)
    heapq.heapify(takers)
    for _ in range(len(cost) + len(ranks)):
        # Entries whose load has changed since are dropped when they come up.
        while -donors[0][0] != load[donors[0][1]]:
            heapq.heappop(donors)
        a = donors[0][1]
        if load[a] <= ceiling:
            return
        _sort_run(cost, sample, start, is_sorted, a)
        tried = [(load[a], a) for _ in range(0)]  # an empty list whose type numba knows
        i, j, b = -1, -1, -1
        while i < 0 and len(takers) > 0 and len(tried) < _PATIENCE:
            entry = heapq.heappop(takers)
            b = entry[1]
            if entry[0] != load[b]:
                continue
            tried.append(entry)
            _sort_run(cost, sample, start, is_sorted, b)
            i, j = _choose(
                cost[start[a] : start[a + 1]], cost[start[b] : start[b + 1]], load[a] - ceiling, ceiling - load[b]
            )
            if i < 0 and slack >= 0:
                i, j = _halve(
                    cost[start[a] : start[a + 1]], cost[start[b] : start[b + 1]], load[a] - load[b], slack // 8
                )
        for entry in tried:
            heapq.heappush(takers, entry)
        if i < 0:
            return
        i, j = start[a] + i, start[b] + j
        shift = cost[i] - cost[j]
        cost_a, sample_a = cost[i], sample[i]
        _replace(cost, sample, start[a], start[a + 1], i, cost[j], sample[j])
        _replace(cost, sample, start[b], start[b + 1], j, cost_a, sample_a)
        load[a] -= shift
        load[b] += shift
        for r in (a, b):
            heapq.heappush(donors, (-load[r], r))
            heapq.heappush(takers, (load[r], r))


def _choose(donor: Ints, taker: Ints, excess: Int, room: Int) -> tuple[Int, Int]:
    """Positions of a swap that takes the most off the donor within the taker's `room`, or enough; −1 if there is none.

    Among swaps that free the donor of its `excess`, or of nearly as much as the best, the one with the cheapest sample
    coming back wins: what comes back is traffic that takes nothing off.
    """
    if room <= 0:
        return -1, -1
    # For each sample of the taker, the dearest of the donor's that fits for it.
    fits = np.searchsorted(donor, taker + room, side="right") - 1
    shift = np.where(fits >= 0, donor[np.maximum(fits, 0)] - taker, 0)
    best = shift.max()
    if best <= 0:
        return -1, -1
    j = np.argmax(shift >= min(excess, best - best // 8))
    return fits[j], j


def _halve(donor: Ints, taker: Ints, gap: Int, gain: Int) -> tuple[Int, Int]:
    """Positions of the swap that brings two loads `gap` apart closest; −1 if the higher sinks by ≤ `gain`."""
    best, best_i, best_j = max(gain, 0), -1, -1
    above = np.searchsorted(donor, taker + gap // 2, side="right")
    for j in range(len(taker)):
        for i in range(max(above[j] - 1, 0), min(above[j] + 1, len(donor))):
            shift = donor[i] - taker[j]
            sinks = min(shift, gap - shift)  # how far the higher of the two new loads is below the old one
            if sinks > best:
                best, best_i, best_j = sinks, i, j
    return best_i, best_j


def _sort_run(cost: Ints, sample: Ints, start: Ints, is_sorted: NDArray[np.bool_], rank: Int) -> None:
    if not is_sorted[rank]:
        run_cost, run_sample = cost[start[rank] : start[rank + 1]], sample[start[rank] : start[rank + 1]]
        order = np.argsort(run_cost, kind="mergesort")
        run_cost[:], run_sample[:] = run_cost[order], run_sample[order]
        is_sorted[rank] = True


def _replace(cost: Ints, sample: Ints, first: Int, stop: Int, position: Int, new_cost: Int, new_sample: Int) -> None:
    """Takes the entry at `position` out of a sorted run, and puts the new one where it belongs."""
    to = first + np.searchsorted(cost[first:stop], new_cost, side="left")
    if to > position:  # the old entry makes room below
        to -= 1
        cost[position:to] = cost[position + 1 : to + 1].copy()
        sample[position:to] = sample[position + 1 : to + 1].copy()
    else:
        cost[to + 1 : position + 1] = cost[to:position].copy()
        sample[to + 1 : position + 1] = sample[to:position].copy()
    cost[to], sample[to] = new_cost, new_sample


HELPERS = (_choose, _halve, _sort_run, _replace)
"""What `swap_pairs` calls."""
