"""Rows out of two sources in one output: prefetched embeddings merged with those that had to wait."""

import torch
from torch import Tensor

from fs_kernels._checks import check_rows
from fs_kernels._dispatch import Impl, torch_only


def merge_rows(first: Tensor, second: Tensor, source: Tensor, *, impl: Impl = "auto") -> Tensor:
    """Row n is `first[source[n]]` where `source[n] >= 0`, else `second[~source[n]]`.

    Args:
        first: `(F, D)`.
        second: `(S, D)`, dtype and device of `first`.
        source: `(N,)` int64.

    Returns:
        `(N, D)`. Gradients flow to both sources.
    """
    check_rows(first, "first")
    check_rows(second, "second")
    if first.shape[1] != second.shape[1] or first.dtype != second.dtype:
        raise ValueError(
            f"first and second must agree in width and dtype, got {tuple(first.shape)} {first.dtype} and "
            f"{tuple(second.shape)} {second.dtype}"
        )
    if source.dtype != torch.int64 or source.dim() != 1:
        raise ValueError(f"source must be (N,) int64, got {tuple(source.shape)} {source.dtype}")
    torch_only(impl, "merge_rows")
    return reference(first, second, source)


def reference(first: Tensor, second: Tensor, source: Tensor) -> Tensor:
    """The definition, in plain torch on any device; its gradient is autograd's."""
    out = first.new_empty(len(source), first.shape[1])
    is_first = source >= 0
    out[is_first] = first[source[is_first]]
    out[~is_first] = second[~source[~is_first]]
    return out
