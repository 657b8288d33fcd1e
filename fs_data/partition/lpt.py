"""Longest processing time first (Graham 1969), with equal counts."""

import numpy as np

from fs_data.partition.compiled import quickest
from fs_data.partition.longest_first import by_heap, by_rounds
from fs_data.partition.order import most_expensive_first
from fs_data.plan import Assignment, RuntimeInfo, WorldBatch


def lpt(world: WorldBatch, runtime: RuntimeInfo) -> Assignment:
    """The dearest sample left goes to the rank with the least cost that still has room; ties to the lower rank.

    Counts differ by at most one. The most even of the plans, and it moves nearly every sample.
    """
    order = most_expensive_first(world.cost)
    destination = np.empty(len(order), np.int64)
    rest = by_rounds(world.cost, order, destination, world.world_size)
    if rest.start < len(order):
        finish = quickest(by_heap, num_samples=len(order) - rest.start)
        finish(world.cost, order, destination, *rest)
    return destination
