"""The loop of lpt: by rounds in numpy while they are long, then by a heap in the part of Python that numba compiles."""

import heapq
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]

_SHORT = 8
"""Rounds that place less than an eighth of the ranks are no quicker than the heap,"""
_PATIENCE = 8
"""which is judged after so many."""


class Unfinished(NamedTuple):
    """What the rounds leave to the heap."""

    start: int  # the samples before it in the order have their destinations
    load: Ints  # (ranks,), of those that have room
    taken: Ints  # (ranks,), samples
    extra: int  # ranks that may still take one sample more than the others


def by_rounds(cost: Ints, order: Ints, destination: Ints, world_size: int) -> Unfinished:
    """Write `destination` (N,) for the samples as `order` (N,) has them, for as long as that pays.

    In a round the ranks take one sample each, the least loaded first. It is what they would do one by one as long as
    no rank that has taken one is again below the next in line: there the round ends, and the line is sorted anew.
    Costs that are alike make rounds of all ranks.
    """
    room, extra = len(cost) // world_size, len(cost) % world_size
    taken, load = np.zeros(world_size, np.int64), np.zeros(world_size, np.int64)
    if len(cost) == 0 or int(cost.max()) * (room + 1) * world_size >= 2**62:  # loads and ranks would not fit one key
        return Unfinished(0, load, taken, extra)
    line = np.arange(world_size)  # load * world_size + rank of those that have room, sorted
    added = cost[order] * world_size
    start = num_rounds = 0
    while start < len(cost) and start * _SHORT >= (num_rounds - _PATIENCE) * world_size:
        taker = line[: len(cost) - start]
        after = taker + added[start : start + len(taker)]
        ends = np.flatnonzero(np.minimum.accumulate(after[:-1]) < taker[1:])
        length = int(ends[0]) + 1 if len(ends) else len(taker)
        with_extra = np.flatnonzero(taken[taker[:length] % world_size] == room)
        if len(with_extra) > extra:
            length = int(with_extra[extra])
        rank = taker[:length] % world_size
        destination[order[start : start + length]] = rank
        taken[rank] += 1
        extra -= min(extra, len(with_extra))
        line = np.concatenate([after[:length], line[length:]])
        line = np.sort(line[taken[line % world_size] < room + (extra > 0)])
        start, num_rounds = start + length, num_rounds + 1
    load[line % world_size] = line // world_size
    return Unfinished(start, load, taken, extra)


def by_heap(cost: Ints, order: Ints, destination: Ints, start: int, load: Ints, taken: Ints, extra: int) -> None:
    """The same, one sample at a time, from sample `start` of the order on; changes `load` and `taken`, too."""
    room = len(cost) // len(load)
    heap = [(load[r], r) for r in range(len(load)) if taken[r] < room + (extra > 0)]
    heapq.heapify(heap)
    for s in order[start:]:
        while taken[heap[0][1]] == room and extra == 0:
            heapq.heappop(heap)
        r = heap[0][1]
        if taken[r] == room:
            extra -= 1
        taken[r] += 1
        load[r] += cost[s]
        destination[s] = r
        if taken[r] > room:
            heapq.heappop(heap)
        else:
            heapq.heapreplace(heap, (load[r], r))
