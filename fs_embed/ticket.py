"""Batches that were announced: which ids their lookups will bring, and how to tell them again."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fs_embed.route import Keys

Signature = tuple[object, ...]


def signature(ids: Tensor) -> Signature:
    """Tells an id tensor again without reading a value: its memory, how it lies there, and how often it was written."""
    storage = ids.untyped_storage().data_ptr()
    version = -1 if ids.is_inference() else ids._version
    return (storage, ids.storage_offset(), tuple(ids.shape), ids.stride(), ids.dtype, ids.device, version)


@dataclass(slots=True, eq=False)
class Lookup:
    """What one call of a module looks up."""

    sources: Sequence[Tensor]
    """The tensors that the call was given. While they live, their memory is no other tensor's."""
    keys: Sequence[Keys]
    """For each store."""
    signatures: list[Signature] = field(init=False)

    def __post_init__(self) -> None:
        self.signatures = [signature(s) for s in self.sources]

    @property
    def is_empty(self) -> bool:
        return all(s.numel() == 0 for s in self.sources)

    def is_same(self, other: "Lookup", *, by_value: bool) -> bool:
        """Whether both bring the same ids: the same memory, unwritten since.

        `by_value` accepts equal values too, on the CPU, where reading them is cheap. Keys are compared: copies of what
        the tensors held when they were announced.
        """
        if self.signatures == other.signatures:
            return True
        return by_value and all(_equal(a.values, b.values) for a, b in zip(self.keys, other.keys, strict=True))


def _equal(a: Tensor, b: Tensor) -> bool:
    return a.device.type == "cpu" == b.device.type and torch.equal(a, b)


@dataclass(slots=True, eq=False)
class Ticket:
    """One announced batch."""

    lookups: list[Lookup]
    """In call order."""
    parts: list[Any] = field(default_factory=list[Any])
    """What each store knows of it."""
    is_stale: bool = False
    """The tables were overwritten since."""

    def places_of(self, lookup: Lookup, *, by_value: bool = True) -> list[int]:
        """Which of the batch's lookups this can be."""
        return [j for j, announced in enumerate(self.lookups) if announced.is_same(lookup, by_value=by_value)]
