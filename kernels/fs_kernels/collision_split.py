"""Which ids of one set occur in another: the rows that two consecutive batches share."""

import torch
from torch import Tensor

from fs_kernels._checks import check_index
from fs_kernels._dispatch import Impl, torch_only


def collision_split(ids: Tensor, other: Tensor, *, impl: Impl = "auto") -> Tensor:
    """`(N,)` bool: whether each of `ids` `(N,)` occurs in `other` `(M,)`, both int, any order, duplicates allowed.

    Costs what the two sets cost, whatever the size of the table that the ids point into.
    """
    check_index(ids, "ids")
    check_index(other, "other")
    torch_only(impl, "collision_split")
    return reference(ids, other)


def reference(ids: Tensor, other: Tensor) -> Tensor:
    return torch.isin(ids, other)
