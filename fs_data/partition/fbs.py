"""FBS, fixed batch size (paper, section 4): sorted samples are dealt out to and fro, so that counts are equal."""

import numpy as np

from fs_data.partition.order import most_expensive_first
from fs_data.plan import Assignment, RuntimeInfo, WorldBatch


def fbs(world: WorldBatch, runtime: RuntimeInfo) -> Assignment:
    """Zig-zag: of n ranks, rank i takes the sorted positions i, 2n − 1 − i, 2n + i, 4n − 1 − i, …, counted from 0.

    (The paper writes 2n − i, which leaves out a position when counted from 0.) Any cost that grows with length gives
    the same plan, so it needs no cost model. Moves nearly every sample.
    """
    n = world.world_size
    turn = np.arange(len(world.cost)) % (2 * n)
    destination = np.empty(len(world.cost), np.int64)
    destination[most_expensive_first(world.cost)] = np.minimum(turn, 2 * n - 1 - turn)
    return destination
