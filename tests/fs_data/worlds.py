"""Global batches for tests of plans: written out, and drawn from the distributions that histories follow."""

import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray

from fs_data import WorldBatch


def world(costs: list[list[int]]) -> WorldBatch:
    """Samples of each rank by cost; tokens are the cost, bytes eight times it."""
    cost = np.array([c for of_rank in costs for c in of_rank], np.int64)
    rank = np.repeat(np.arange(len(costs)), [len(of_rank) for of_rank in costs])
    return WorldBatch(world_size=len(costs), rank=rank, cost=cost, num_tokens=cost, num_bytes=8 * cost)


def heavy_tailed(num_ranks: int, batch: int, seed: int = 0, kind: str = "lognormal") -> WorldBatch:
    """Lengths lognormal (median 3,500, σ 0.9) or Pareto(1.1), clipped at 21,000; cost as of attention and the rest."""
    rng = np.random.default_rng(seed)
    n = num_ranks * batch
    drawn = rng.lognormal(np.log(3500), 0.9, n) if kind == "lognormal" else (rng.pareto(1.1, n) + 1) * 200
    lengths = drawn.clip(1, 21_000).astype(np.int64)
    return WorldBatch(
        world_size=num_ranks,
        rank=np.repeat(np.arange(num_ranks), batch),
        cost=10 * 1024**2 * lengths + 2048 * lengths**2,
        num_tokens=lengths,
        num_bytes=8 * lengths + 64,
    )


def loads(w: WorldBatch, destination: NDArray[np.int64]) -> NDArray[np.int64]:
    total = np.zeros(w.world_size, np.int64)
    np.add.at(total, destination, w.cost)
    return total


def counts(w: WorldBatch, destination: NDArray[np.int64]) -> NDArray[np.int64]:
    return np.bincount(destination, minlength=w.world_size)


def ragged(max_cost: int = 60) -> st.SearchStrategy[list[list[int]]]:
    """Costs of up to five ranks with 0 to 9 samples each; at least one sample in all."""
    return st.lists(st.lists(st.integers(0, max_cost), max_size=9), min_size=1, max_size=5).filter(any)


def even(max_cost: int = 60) -> st.SearchStrategy[list[list[int]]]:
    """Costs of up to five ranks with equally many samples."""
    return st.integers(1, 7).flatmap(
        lambda n: st.lists(st.lists(st.integers(0, max_cost), min_size=n, max_size=n), min_size=1, max_size=5)
    )
