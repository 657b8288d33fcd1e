"""Sums of segments in one fixed order: a row's gradient over all places where the row was looked up.

The order is a binary tree that depends on a segment's length alone: neighbours are added, then neighbouring sums, and
an odd one out moves up as it is. Whatever else is summed in the same call, a segment's bits are the same; and a segment
of 10⁶ rows takes 20 steps, not 10⁶.

Legend: S segments, K summands of all segments, D features.
"""

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from fs_kernels._checks import (
    accumulator,
    check_bounds,
    check_devices,
    check_ends,
    check_float,
    check_index,
    check_offsets,
    check_rows,
)
from fs_kernels._dispatch import Impl, resolve_impl
from fs_kernels._library import register


def segment_sum(values: Tensor, offsets: Tensor, *, index: Tensor | None = None, impl: Impl = "auto") -> Tensor:
    """`out[s] = Σ values[index[k]]` over k from `offsets[s]` to `offsets[s + 1] - 1`, in the tree's order.

    Args:
        values: `(N, D)` float.
        offsets: `(S + 1,)` int64, non-decreasing, from 0 to K.
        index: `(K,)` int32 or int64, from 0 to N - 1; None stands for 0, 1, …, N - 1.

    Returns:
        `(S, D)` in the dtype of `values`; accumulated in float32 (float64 for float64). An empty segment gives zeros.
        All implementations give the same bits. Gradients flow to `values`, summed by the same tree.
    """
    check_rows(values, "values")
    check_float(values, "values")
    check_offsets(offsets)
    check_devices(values, offsets=offsets, index=index)
    if index is not None:
        check_index(index)
    return _segment_sum(values, offsets, index, impl)


def reference(values: Tensor, offsets: Tensor, index: Tensor | None = None) -> Tensor:
    """The definition, level by level; segments that are down to one value leave."""
    lengths, starts = offsets.diff(), offsets[:-1]
    if len(lengths) and bool((lengths == 1).all()):  # ids that occur once: nothing to add
        return _rows(values, index, starts).to(values.dtype)
    out = torch.zeros(len(lengths), values.shape[1], dtype=accumulator(values.dtype), device=values.device)
    single = (lengths == 1).nonzero().squeeze(1)
    out.index_copy_(0, single, _rows(values, index, starts[single]))

    segments = (lengths > 1).nonzero().squeeze(1)  # those still open
    lengths = lengths[segments]
    places = _ranges(starts[segments], lengths)
    level = _rows(values, index, places)
    while len(segments):
        half = (lengths + 1) // 2
        left = 2 * _ranges(torch.zeros_like(half), half)  # place of each pair's left one in its segment
        first = _starts(lengths).repeat_interleave(half) + left
        paired = (left + 1 < lengths.repeat_interleave(half)).nonzero().squeeze(1)
        sums = level.index_select(0, first)
        sums.index_add_(0, paired, level.index_select(0, first[paired] + 1))

        done = half == 1
        out.index_copy_(0, segments[done], sums[_starts(half)[done]])
        level = sums[~done.repeat_interleave(half)]
        segments, lengths = segments[~done], half[~done]
    return out.to(values.dtype)


def _rows(values: Tensor, index: Tensor | None, places: Tensor) -> Tensor:
    rows = places if index is None else index[places]
    return values.index_select(0, rows).to(accumulator(values.dtype))


def _starts(lengths: Tensor) -> Tensor:
    return torch.cumsum(lengths, 0) - lengths


def _ranges(starts: Tensor, lengths: Tensor) -> Tensor:
    """`starts[s], starts[s] + 1, …` for each s, `lengths[s]` of them, back to back."""
    within = torch.arange(int(lengths.sum()), device=lengths.device) - _starts(lengths).repeat_interleave(lengths)
    return starts.repeat_interleave(lengths) + within


def places_of(keys: Tensor, num_keys: int) -> tuple[Tensor, Tensor]:
    """Where each of the keys 0 to `num_keys - 1` stands in `keys` `(K,)`.

    Returns:
        Places `(K,)`, those of key i being `places[offsets[i]:offsets[i + 1]]`, ascending; offsets `(num_keys + 1,)`.
    """
    in_order, places = torch.sort(keys, stable=True)
    bounds = torch.arange(num_keys + 1, dtype=keys.dtype, device=keys.device)
    return places, torch.searchsorted(in_order, bounds)


def _run(values: Tensor, offsets: Tensor, index: Tensor | None, impl: Impl) -> Tensor:
    check_ends(offsets, values.shape[0] if index is None else index.shape[0])
    if index is not None:
        check_bounds(index, 0, values.shape[0])
    if resolve_impl(impl, values) == "reference":
        return reference(values, offsets, index)
    from fs_kernels.segment_sum_triton import segment_sum_triton

    return segment_sum_triton(values, offsets, index)


def _fake(values: Tensor, offsets: Tensor, index: Tensor | None, impl: Impl) -> Tensor:
    return values.new_empty(offsets.shape[0] - 1, values.shape[1])


class _Context(FunctionCtx):
    saved_tensors: tuple[Tensor, Tensor | None]
    num_rows: int
    impl: Impl


def _setup_context(ctx: _Context, inputs: tuple[Tensor, Tensor, Tensor | None, Impl], output: Tensor) -> None:
    values, offsets, index, ctx.impl = inputs
    ctx.num_rows = values.shape[0]
    ctx.save_for_backward(offsets, index)  # pyright: ignore[reportArgumentType]  # None may be saved too


def _backward(ctx: _Context, grad: Tensor) -> tuple[Tensor, None, None, None]:
    """A row's gradient is the sum of the gradients of the segments that it is in: each row a segment of segments."""
    offsets, index = ctx.saved_tensors
    num_summands = ctx.num_rows if index is None else index.shape[0]
    segments = torch.arange(grad.shape[0], device=grad.device)
    segment = segments.repeat_interleave(offsets.diff(), output_size=num_summands)  # (K,)
    if index is None:
        return grad.index_select(0, segment), None, None, None
    places, row_offsets = places_of(index, ctx.num_rows)
    return _segment_sum(grad, row_offsets, segment[places], ctx.impl), None, None, None


_segment_sum = register(
    "segment_sum(Tensor values, Tensor offsets, Tensor? index, str impl) -> Tensor",
    _run,
    fake=_fake,
    backward=_backward,
    setup_context=_setup_context,
)
