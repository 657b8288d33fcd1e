"""Rows of a jagged tensor in another order: what a rank does with its samples before and after an exchange."""

import torch
from torch import Tensor

from fs_kernels._checks import check_index, check_offsets
from fs_kernels._dispatch import Impl, resolve_impl


def jagged_permute(
    values: Tensor, offsets: Tensor, index: Tensor, *, out_size: int | None = None, impl: Impl = "auto"
) -> tuple[Tensor, Tensor]:
    """The rows `index` of a jagged tensor, back to back; rows may repeat or be left out.

    Args:
        values: `(N, ...)`, any dtype; row b is `values[offsets[b]:offsets[b + 1]]`.
        offsets: `(B + 1,)` int64, non-decreasing, from 0 to N.
        index: `(M,)` int32 or int64, from 0 to B - 1.
        out_size: N', the number of values that come out, where the caller knows it: saves waiting for the device.

    Returns:
        Values `(N', ...)` and offsets `(M + 1,)` int64.
    """
    check_offsets(offsets)
    check_index(index)
    out_offsets = torch.zeros(len(index) + 1, dtype=torch.int64, device=offsets.device)
    torch.cumsum(offsets.diff()[index], 0, out=out_offsets[1:])
    if out_size is None:
        out_size = int(out_offsets[-1])
    if resolve_impl(impl, values) == "reference":
        return reference(values, offsets, index, out_offsets, out_size), out_offsets
    from fs_kernels.jagged_permute_triton import jagged_permute_triton

    return jagged_permute_triton(values, offsets, index, out_offsets, out_size), out_offsets


def reference(values: Tensor, offsets: Tensor, index: Tensor, out_offsets: Tensor, out_size: int) -> Tensor:
    """The definition: value n of output row m is value n of input row `index[m]`. Gradients are autograd's."""
    return values.index_select(0, source_places(offsets, index, out_offsets, out_size))


def source_places(offsets: Tensor, index: Tensor, out_offsets: Tensor, out_size: int) -> Tensor:
    """`(N',)`: where each output value stands in the input."""
    shift = offsets[:-1][index] - out_offsets[:-1]  # (M,) from an output place to its input place
    places = torch.arange(out_size, device=offsets.device)
    return places + torch.repeat_interleave(shift, out_offsets.diff(), output_size=out_size)
