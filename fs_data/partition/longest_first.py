"""The loop of lpt, in the part of Python that numba compiles."""

import heapq

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]


def longest_first(cost: Ints, order: Ints, world_size: int) -> Ints:
    """`(N,)` destinations, given in the `order` (N,) of samples; a rank leaves the heap when it is full."""
    room, extra = len(cost) // world_size, len(cost) % world_size  # `extra` ranks take one sample more
    count = np.zeros(world_size, np.int64)
    destination = np.empty(len(cost), np.int64)
    load = np.zeros(world_size, np.int64)
    heap = [(load[r], r) for r in range(world_size)]
    for s in order:
        while count[heap[0][1]] == room and extra == 0:
            heapq.heappop(heap)
        r = heap[0][1]
        if count[r] == room:
            extra -= 1
        count[r] += 1
        load[r] += cost[s]
        destination[s] = r
        if count[r] > room:
            heapq.heappop(heap)
        else:
            heapq.heapreplace(heap, (load[r], r))
    return destination
