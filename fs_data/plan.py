"""What a partitioner is given and what it answers: numbers in, numbers out, the same on every rank.

Costs are integers and every order is total (ties go by global index): floats and unstable sorts differ between
processors, and ranks that plan differently would exchange different samples.

Legend: N samples in the global batch, R ranks, K steps of history.
"""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fs_data.errors import LoaderError

Assignment = NDArray[np.int64]
"""`(N,)`: the rank that will train on each sample."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WorldBatch:
    """All ranks' samples of one step, in global order: rank after rank, each in its loader's order."""

    world_size: int
    """R."""
    rank: NDArray[np.int64]
    """`(N,)`, non-decreasing: the rank that holds each sample now. Ranks may hold different numbers, or none."""
    cost: NDArray[np.int64]
    """`(N,)`, at least 0: what computing on the sample costs, in the cost model's unit."""
    num_tokens: NDArray[np.int64]
    """`(N,)`: items of history, which is what activation memory grows with."""
    num_bytes: NDArray[np.int64]
    """`(N,)`: what moving the sample to another rank sends."""
    num_samples: NDArray[np.int64] | None = None
    """`(N,)`: where samples have groups, each entry is a group, of so many; None where each is one sample."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RuntimeInfo:
    """What is known at planning time beyond the batch, the same on every rank."""

    step: int = 0
    """Counts the batches of the loader's life."""
    host: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    """`(R,)`: the host of each rank, for plans that prefer moves within a host; empty means one host."""
    compute_ns: NDArray[np.int64] = field(default_factory=lambda: np.zeros((0, 0), np.int64))
    """`(K, R)`: compute times of the latest steps known to all ranks, newest last; waiting for peers excluded."""


def check_assignment(value: Any, world: WorldBatch, name: str) -> Assignment:
    """`value` as int64, if it gives each sample a rank and each rank a sample (where there are enough).

    Args:
        value: What the partition function `name` answered for `world`.
    """
    destination, num_samples = np.asarray(value), len(world.rank)
    if destination.shape != (num_samples,) or not np.issubdtype(destination.dtype, np.integer):
        raise LoaderError(
            f"{name} must give ({num_samples},) integers, the rank of each sample, "
            f"got {destination.shape} {destination.dtype}"
        )
    if num_samples and not 0 <= int(destination.min()) <= int(destination.max()) < world.world_size:
        raise LoaderError(
            f"{name} must give ranks from 0 to {world.world_size - 1}, got {destination.min()} to {destination.max()}"
        )
    destination = destination.astype(np.int64)
    empty = np.flatnonzero(np.bincount(destination, minlength=world.world_size) == 0)
    if len(empty) and num_samples >= world.world_size:
        raise LoaderError(
            f"{name} must give every rank at least one sample, ranks {empty.tolist()} got none of {num_samples}"
        )
    return destination
