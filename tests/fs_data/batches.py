"""Batches for the loader's tests: every leaf of a sample repeats its id, so that a mixed-up sample shows anywhere."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from fs_data import BalancedDataLoader, JaggedColumn, RuntimeInfo, WorldBatch

Batch = dict[str, Any]


def make_batch(ids: Sequence[int], seed: int = 0) -> Batch:
    """Users `ids`, each with a history of 0 to 40 items that are its id, a row of floats, a flag and a name."""
    lengths = torch.tensor([length_of(i, seed) for i in ids], dtype=torch.int64)
    user = torch.tensor(list(ids), dtype=torch.int64)
    return {
        "user": user,
        "seq": JaggedColumn.from_lengths(user.repeat_interleave(lengths), lengths),
        "dense": user[:, None].repeat(1, 3).to(torch.bfloat16),
        "flag": user % 2 == 0,
        "name": [f"user {i}" for i in ids],
    }


def length_of(user: int, seed: int = 0) -> int:
    """Heavy-tailed, and the same wherever it is asked."""
    draw = np.random.default_rng((user, seed)).pareto(1.5)
    return int(min(40, draw * 4))


def check_batch(batch: Batch) -> list[int]:
    """The batch's users, after checking that every leaf agrees with them."""
    user: torch.Tensor = batch["user"]
    assert torch.equal(batch["seq"].values, user.repeat_interleave(batch["seq"].lengths))
    assert batch["seq"].lengths.tolist() == [length_of(int(i)) for i in user]
    assert torch.equal(batch["dense"], user[:, None].repeat(1, 3).to(torch.bfloat16))
    assert torch.equal(batch["flag"], user % 2 == 0)
    assert batch["name"] == [f"user {i}" for i in user.tolist()]
    return user.tolist()


class Batches:
    """An iterable of batches whose users are `1000 * rank + 0, 1, …`, `sizes[i]` of them in batch i."""

    def __init__(self, sizes: Sequence[int], rank: int | None = None) -> None:
        self.sizes = list(sizes)
        self.rank = rank_here() if rank is None else rank

    def __len__(self) -> int:
        return len(self.sizes)

    def __iter__(self) -> Iterator[Batch]:
        first = 1000 * self.rank
        for size in self.sizes:
            yield make_batch(range(first, first + size))
            first += size


class Users(torch.utils.data.Dataset[int]):
    """Map-style: user ids of one rank."""

    def __init__(self, size: int, rank: int | None = None) -> None:
        self.size, self.rank = size, rank_here() if rank is None else rank

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, i: int) -> int:
        return 1000 * self.rank + i


def rank_here() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def zigzag(world: WorldBatch, runtime: RuntimeInfo) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Moves nearly everything: sorted by cost, dealt out to and fro."""
    order = np.lexsort((np.arange(len(world.cost)), -world.cost))
    turn = np.arange(len(order)) % (2 * world.world_size)
    out = np.empty(len(order), np.int64)
    out[order] = np.minimum(turn, 2 * world.world_size - 1 - turn)
    return out


def stay(world: WorldBatch, runtime: RuntimeInfo) -> np.ndarray[Any, np.dtype[np.int64]]:
    return world.rank.copy()


def users_of(loader: BalancedDataLoader[Batch]) -> list[list[int]]:
    """One pass: the users of each batch, checked."""
    return [check_batch(batch) for batch in loader]
