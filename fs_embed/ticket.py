"""A batch that was announced: which ids its lookups will bring, and what has been fetched for them."""

from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

import fs_kernels
from fs_embed.route import Route
from fs_embed.worker import Job

Signature = tuple[object, ...]


def signature(ids: Tensor) -> Signature:
    """Tells an id tensor again without reading a value: its memory, how it lies there, and how often it was written."""
    storage = ids.untyped_storage().data_ptr()
    return (storage, ids.storage_offset(), tuple(ids.shape), ids.stride(), ids.dtype, ids.device, ids._version)


class Precursor(Protocol):
    @property
    def update(self) -> Job[None]: ...


@dataclass(slots=True, eq=False)
class Ticket:
    number: int
    """Counts the announced batches; the same on every rank."""
    held: list[Tensor]
    """The id tensors themselves: as long as they live, their memory is no other tensor's."""
    signatures: list[Signature]
    keys: list[Tensor]
    """`(n,)` of each lookup, in call order."""
    routed: Job[Route]
    fetched: Job[Any] | None = None
    """Brings the rows that the batch before does not hold; None while no step has looked this batch up."""

    # Written by the jobs above.
    previous: "Precursor | None" = None
    """The step before, whose update brings the rows that it holds too."""
    collides: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.bool))
    """`(U,)`: which of this rank's distinct ids the batch before holds, on any rank."""
    asked_collides: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.bool))
    """`(Q,)`: the same of the requests that reach this rank as an owner."""
    exclusive_rows: Tensor = field(default_factory=lambda: torch.zeros(0))
    colliding_rows: Tensor = field(default_factory=lambda: torch.zeros(0))

    def merged(self) -> Tensor:
        """`(U, D)`: the rows of all distinct ids."""
        if self.previous is None:
            return self.exclusive_rows
        after = torch.cumsum(self.collides, 0)
        before = torch.arange(1, len(after) + 1, device=after.device) - after
        source = torch.where(self.collides, ~(after - 1), before - 1)
        return fs_kernels.merge_rows(self.exclusive_rows, self.colliding_rows, source)
