"""Longest processing time first (Graham 1969), with equal counts."""

from fs_data.partition.compiled import quickest
from fs_data.partition.longest_first import longest_first
from fs_data.partition.order import most_expensive_first
from fs_data.plan import Assignment, RuntimeInfo, WorldBatch


def lpt(world: WorldBatch, runtime: RuntimeInfo) -> Assignment:
    """The dearest sample left goes to the rank with the least cost that still has room; ties to the lower rank.

    Counts differ by at most one. The most even of the plans, and it moves nearly every sample.
    """
    place = quickest(longest_first, num_samples=len(world.cost))
    return place(world.cost, most_expensive_first(world.cost), world.world_size)
