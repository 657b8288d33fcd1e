"""Which ids of one set occur in another: the rows that two consecutive batches share."""

import torch
from torch import Tensor

from fs_kernels._checks import check_devices, check_index
from fs_kernels._dispatch import Impl, resolve_impl
from fs_kernels._library import register


def collision_split(ids: Tensor, other: Tensor, *, impl: Impl = "auto") -> Tensor:
    """`(N,)` bool: whether each of `ids` `(N,)` occurs in `other` `(M,)`, both int, any order, duplicates allowed.

    Costs what the two sets cost, whatever the size of the table that the ids point into; never waits for the device.
    """
    check_index(ids, "ids")
    check_index(other, "other")
    check_devices(ids, other=other)
    return _collision_split(ids, other, impl)


def reference(ids: Tensor, other: Tensor) -> Tensor:
    return torch.isin(ids, other)


def _run(ids: Tensor, other: Tensor, impl: Impl) -> Tensor:
    if resolve_impl(impl, ids) == "reference":
        return reference(ids, other)
    from fs_kernels.collision_split_triton import collision_split_triton

    return collision_split_triton(ids, other)


def _fake(ids: Tensor, other: Tensor, impl: Impl) -> Tensor:
    return ids.new_empty(ids.shape, dtype=torch.bool)


_collision_split = register("collision_split(Tensor ids, Tensor other, str impl) -> Tensor", _run, fake=_fake)
