"""Fixed batch size (the paper's FBS): sort by cost, deal in zig-zag."""

import numpy as np

from fs_data.plan import Assignment, RuntimeInfo, WorldBatch


def fbs(world: WorldBatch, runtime: RuntimeInfo) -> Assignment:
    """Rank i takes positions i, 2R - 1 - i, 2R + i, 4R - 1 - i, … of the samples by falling cost, counted from zero.

    Equal costs go by global index. Counts differ by at most one; nearly every sample moves.
    """
    order = np.argsort(-world.cost, kind="stable")
    position = np.arange(len(order)) % (2 * world.world_size)
    dealt = np.where(position < world.world_size, position, 2 * world.world_size - 1 - position)
    assignment = np.empty(len(order), np.int64)
    assignment[order] = dealt
    return assignment
