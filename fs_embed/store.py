"""One rank's share of some tables of one width: rows, optimizer state, and the update by all ranks' gradients."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
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
        self.versions: Tensor | None = None
        """`(slots,)` int64: how many updates each row has had, where that is checked."""
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

    def _count_write(self, slots: Tensor) -> None:
        if self.versions is not None:
            self.versions[slots] += 1

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
        wide = grads.to(torch.promote_types(grads.dtype, torch.float32))  # sums of 16-bit gradients stay in 32 bits
        if self.shards.world_size == 1:  # each slot once, and a sum of one gradient is that gradient
            optimizer.update_(self.weight, self.state, slots, wide, step)
            self._count_write(slots)
            return
        groups = group_equal(slots)
        total = fs_kernels.segment_sum(wide, groups.offsets, index=groups.places)
        optimizer.update_(self.weight, self.state, groups.distinct, total, step)
        self._count_write(groups.distinct)


class Groups(NamedTuple):
    """Equal keys, of n."""

    distinct: Tensor
    """`(U,)`, ascending."""
    places: Tensor
    """`(n,)`: those of key u are `places[offsets[u]:offsets[u + 1]]`, ascending."""
    offsets: Tensor
    """`(U + 1,)`."""
    inverse: Tensor
    """`(n,)`: which distinct key stands at each place."""


def group_equal(keys: Tensor) -> Groups:
    """The distinct ones of `keys` `(n,)`, and where each occurs; reads one number from the device, U."""
    in_order, places = torch.sort(keys, stable=True)
    is_first = torch.ones_like(keys, dtype=torch.bool)
    torch.ne(in_order[1:], in_order[:-1], out=is_first[1:])
    first = is_first.nonzero().squeeze(1)
    inverse = torch.empty_like(places).scatter_(0, places, is_first.cumsum(0) - 1)
    return Groups(in_order[first], places, F.pad(first, (0, 1), value=len(keys)), inverse)


def counts_in_order(ascending: Tensor, bounds: Sequence[int]) -> Sequence[int]:
    """How many of `ascending` `(n,)` are from one bound to the next; `len(bounds) - 1` numbers."""
    places = torch.searchsorted(ascending, torch.tensor(bounds, device=ascending.device))
    return places.diff().tolist()


def counts_by_rank(ranks: Tensor, world_size: int) -> Sequence[int]:
    """How many of `ranks` `(n,)` are 0, 1, …, R - 1."""
    return torch.bincount(ranks, minlength=world_size).tolist()
