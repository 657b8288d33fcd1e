"""Rows out of two sources in one output: prefetched embeddings merged with those that had to wait.

Legend: F rows of the first source, S of the second, N output rows, D features.
"""

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from fs_kernels._checks import check_bounds, check_devices, check_index, check_rows
from fs_kernels._dispatch import Impl, resolve_impl
from fs_kernels._library import register
from fs_kernels.segment_sum import places_of, segment_sum


def merge_rows(first: Tensor, second: Tensor, source: Tensor, *, impl: Impl = "auto") -> Tensor:
    """Row n is `first[source[n]]` where `source[n] >= 0`, else `second[~source[n]]`.

    Args:
        first: `(F, D)`, any dtype.
        second: `(S, D)`, dtype and device of `first`.
        source: `(N,)` int32 or int64, from -S to F - 1.

    Returns:
        `(N, D)`. Gradients flow to both sources; those of a row that was taken more than once are added by
        `segment_sum`'s tree.
    """
    check_rows(first, "first")
    check_rows(second, "second")
    if first.shape[1] != second.shape[1] or first.dtype != second.dtype:
        raise ValueError(
            f"first and second must agree in width and dtype, got {tuple(first.shape)} {first.dtype} and "
            f"{tuple(second.shape)} {second.dtype}"
        )
    check_index(source, "source")
    check_devices(first, second=second, source=source)
    return _merge_rows(first, second, source, impl)


def reference(first: Tensor, second: Tensor, source: Tensor) -> Tensor:
    """The definition, in plain torch on any device."""
    out = first.new_empty(len(source), first.shape[1])
    is_first = source >= 0
    out[is_first] = first[source[is_first]]
    out[~is_first] = second[~source[~is_first]]
    return out


def _run(first: Tensor, second: Tensor, source: Tensor, impl: Impl) -> Tensor:
    check_bounds(source, -second.shape[0], first.shape[0], "source")
    if resolve_impl(impl, first) == "reference":
        return reference(first, second, source)
    from fs_kernels.merge_rows_triton import merge_rows_triton

    return merge_rows_triton(first, second, source)


def _fake(first: Tensor, second: Tensor, source: Tensor, impl: Impl) -> Tensor:
    return first.new_empty(source.shape[0], first.shape[1])


class _Context(FunctionCtx):
    saved_tensors: tuple[Tensor]
    num_rows: tuple[int, int]
    impl: Impl


def _setup_context(ctx: _Context, inputs: tuple[Tensor, Tensor, Tensor, Impl], output: Tensor) -> None:
    first, second, source, ctx.impl = inputs
    ctx.num_rows = first.shape[0], second.shape[0]
    ctx.save_for_backward(source)


def _backward(ctx: _Context, grad: Tensor) -> tuple[Tensor, Tensor, None, None]:
    (source,) = ctx.saved_tensors
    num_first, num_second = ctx.num_rows
    row = torch.where(source < 0, num_first + ~source, source)  # in the two sources one after the other
    places, offsets = places_of(row, num_first + num_second)
    total = segment_sum(grad, offsets, index=places, impl=ctx.impl)
    return total[:num_first], total[num_first:], None, None


_merge_rows = register(
    "merge_rows(Tensor first, Tensor second, Tensor source, str impl) -> Tensor",
    _run,
    fake=_fake,
    backward=_backward,
    setup_context=_setup_context,
)
