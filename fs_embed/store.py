"""One rank's share of some tables of one width: rows, optimizer state, and the update by all ranks' gradients."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

import fs_kernels
from fs_embed.optim import RowOptimizer
from fs_embed.rows import RowShards


class Store:
    """Reads and updates local slots; of other ranks it knows only the order in which their gradients are added."""

    def __init__(self, shards: RowShards, table_names: Sequence[str], weight: Tensor, optimizer: RowOptimizer) -> None:
        self.shards, self.table_names, self.weight = shards, tuple(table_names), weight
        self.optimizer = optimizer
        """As it was given; a backward takes `optimizer_now`."""
        self.lr: Callable[[], float] | None = None
        """Where a scheduler's learning rate is read, if there is one."""
        self.state = optimizer.make_state(weight)
        self.num_steps = 0
        """Backwards that have updated rows; Adam's bias correction counts them."""

    def optimizer_now(self) -> RowOptimizer:
        """The optimizer with the learning rate of this moment."""
        return self.optimizer if self.lr is None else self.optimizer.with_lr(self.lr())

    @property
    def dim(self) -> int:
        return self.weight.shape[1]

    def read(self, slots: Tensor) -> Tensor:
        """`(Q, D)`: copies of the rows at `slots` `(Q,)`."""
        return self.weight.index_select(0, slots)

    def no_rows(self) -> Tensor:
        return self.weight.new_empty(0, self.dim)

    def next_step(self) -> int:
        """The number of the update that begins."""
        self.num_steps += 1
        return self.num_steps

    def update_(self, slots: Tensor, grads: Tensor, step: int, optimizer: RowOptimizer) -> None:
        """One optimizer step on the rows at `slots` `(Q,)` by `grads` `(Q, D)`, both rank after rank as they came.

        A row's gradients are added in that order, by `segment_sum`'s tree: the bits depend on the row alone.
        """
        if not len(slots):
            return
        rows, order, offsets = group_equal(slots)
        wide = grads.to(torch.promote_types(grads.dtype, torch.float32))  # sums of 16-bit gradients stay in 32 bits
        total = fs_kernels.segment_sum(wide, offsets, index=order)
        optimizer.update_(self.weight, self.state, rows, total, step)


def group_equal(keys: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The distinct keys, ascending, and where each occurs.

    Returns:
        Keys `(U,)`; places `(n,)`, those of key u being `places[offsets[u]:offsets[u + 1]]`, ascending; offsets
        `(U + 1,)`.
    """
    in_order, places = torch.sort(keys, stable=True)
    distinct, counts = torch.unique_consecutive(in_order, return_counts=True)
    offsets = torch.zeros(len(distinct) + 1, dtype=torch.int64, device=keys.device)
    torch.cumsum(counts, 0, out=offsets[1:])
    return distinct, places, offsets


def counts_by_rank(ranks: Tensor, world_size: int) -> Sequence[int]:
    """How many of `ranks` `(n,)` are 0, 1, …, R - 1."""
    return torch.bincount(ranks, minlength=world_size).tolist()
