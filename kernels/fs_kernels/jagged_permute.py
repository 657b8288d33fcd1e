"""Rows of a jagged tensor in another order: what a rank does with its samples before and after an exchange."""

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from fs_kernels._checks import check_bounds, check_devices, check_ends, check_index, check_offsets, check_values
from fs_kernels._dispatch import Impl, resolve_impl
from fs_kernels._library import register


def jagged_permute(
    values: Tensor, offsets: Tensor, index: Tensor, *, out_size: int | None = None, impl: Impl = "auto"
) -> tuple[Tensor, Tensor]:
    """The rows `index` of a jagged tensor, back to back; rows may repeat or be left out.

    Args:
        values: `(N, ...)`, any dtype; row b is `values[offsets[b]:offsets[b + 1]]`.
        offsets: `(B + 1,)` int64, non-decreasing, within 0 to N.
        index: `(M,)` int32 or int64, from 0 to B - 1.
        out_size: N', the number of values that come out, where the caller knows it: saves waiting for the device.

    Returns:
        Values `(N', ...)` and offsets `(M + 1,)` int64. Gradients flow to `values`.
    """
    check_values(values)
    check_offsets(offsets)
    check_index(index)
    check_devices(values, offsets=offsets, index=index)
    return _jagged_permute(values, offsets, index, out_size, impl)


def reference(values: Tensor, offsets: Tensor, index: Tensor, out_size: int | None) -> tuple[Tensor, Tensor]:
    """The definition: value n of output row m is value n of input row `index[m]`."""
    out_offsets = offsets_of(offsets.diff().index_select(0, index))
    if out_size is None:
        out_size = int(out_offsets[-1])
    elif out_offsets.is_cpu and out_size != int(out_offsets[-1]):
        raise ValueError(f"out_size must be {int(out_offsets[-1])}, the number of values of these rows, got {out_size}")
    return values.index_select(0, source_places(offsets, index, out_offsets, out_size)), out_offsets


def offsets_of(lengths: Tensor) -> Tensor:
    """`(..., M + 1)` int64 from 0 to the sum, for `lengths` `(..., M)`."""
    offsets = lengths.new_zeros(*lengths.shape[:-1], lengths.shape[-1] + 1, dtype=torch.int64)
    torch.cumsum(lengths, -1, out=offsets[..., 1:])
    return offsets


def source_places(offsets: Tensor, index: Tensor, out_offsets: Tensor, out_size: int) -> Tensor:
    """`(N',)`: where each output value stands in the input."""
    shift = offsets.index_select(0, index) - out_offsets[:-1]  # (M,) from an output place to its input place
    places = torch.arange(out_size, device=offsets.device)
    return places + torch.repeat_interleave(shift, out_offsets.diff(), output_size=out_size)


def _run(values: Tensor, offsets: Tensor, index: Tensor, out_size: int | None, impl: Impl) -> tuple[Tensor, Tensor]:
    check_ends(offsets, values.shape[0], whole=False)
    check_bounds(index, 0, offsets.shape[0] - 1)
    if resolve_impl(impl, values) == "reference":
        return reference(values, offsets, index, out_size)
    from fs_kernels.jagged_permute_triton import jagged_permute_triton

    return jagged_permute_triton(values, offsets, index, out_size)


def _fake(values: Tensor, offsets: Tensor, index: Tensor, out_size: int | None, impl: Impl) -> tuple[Tensor, Tensor]:
    size = torch.library.get_ctx().new_dynamic_size() if out_size is None else out_size
    return values.new_empty(size, *values.shape[1:]), offsets.new_empty(index.shape[0] + 1)


class _Context(FunctionCtx):
    saved_tensors: tuple[Tensor, ...]
    shape: torch.Size


def _setup_context(
    ctx: _Context, inputs: tuple[Tensor, Tensor, Tensor, int | None, Impl], output: tuple[Tensor, Tensor]
) -> None:
    values, offsets, index, _, _ = inputs
    ctx.save_for_backward(offsets, index, output[1])
    ctx.shape = values.shape


def _backward(ctx: _Context, grad: Tensor, _: Tensor) -> tuple[Tensor, None, None, None, None]:
    offsets, index, out_offsets = ctx.saved_tensors
    source = source_places(offsets, index, out_offsets, grad.shape[0])
    return grad.new_zeros(ctx.shape).index_add(0, source, grad), None, None, None, None


_jagged_permute = register(
    "jagged_permute(Tensor values, Tensor offsets, Tensor index, SymInt? out_size, str impl) -> (Tensor, Tensor)",
    _run,
    fake=_fake,
    backward=_backward,
    setup_context=_setup_context,
)
