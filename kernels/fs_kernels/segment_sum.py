"""Sums of segments in one fixed order: a row's gradient over all places where the row was looked up.

The order is a binary tree that depends on a segment's length alone: neighbours are added, then neighbouring sums, and
an odd one out moves up as it is. Whatever else is summed in the same call, a segment's bits are the same; and a segment
of 10⁶ rows takes 20 steps, not 10⁶.

Legend: S segments, K summands of all segments, D features.
"""

import torch
from torch import Tensor

from fs_kernels._checks import accumulator, check_offsets, check_rows
from fs_kernels._dispatch import Impl, torch_only


def segment_sum(values: Tensor, offsets: Tensor, *, index: Tensor | None = None, impl: Impl = "auto") -> Tensor:
    """`out[s] = Σ values[index[k]]` over k from `offsets[s]` to `offsets[s + 1]`, in the tree's order.

    Args:
        values: `(N, D)` float.
        offsets: `(S + 1,)` int64, non-decreasing, from 0 to K.
        index: `(K,)` int64; None stands for 0, 1, …, N - 1.

    Returns:
        `(S, D)` in the dtype of `values`; accumulated in float32 (float64 for float64). An empty segment gives zeros.
    """
    check_rows(values, "values")
    check_offsets(offsets)
    torch_only(impl, "segment_sum")
    return reference(values, offsets, index)


def reference(values: Tensor, offsets: Tensor, index: Tensor | None = None) -> Tensor:
    """The definition, level by level; segments that are down to one value leave. Gradients are autograd's."""
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
