"""A jagged tensor with keys from feature-major to batch-major order, and back."""

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from fs_kernels._checks import check_devices, check_ends, check_offsets, check_values
from fs_kernels._dispatch import Impl, resolve_impl
from fs_kernels._library import register
from fs_kernels.jagged_permute import reference as permute_rows


def keyed_transpose(values: Tensor, offsets: Tensor, num_outer: int, *, impl: Impl = "auto") -> tuple[Tensor, Tensor]:
    """The rows of a jagged tensor as a grid, transposed: row (i, j) becomes row (j, i).

    Of K keys and B samples, feature-major order (TorchRec's, with `num_outer` K) becomes batch-major order, in which a
    sample's rows lie together; `num_outer` B turns it back.

    Args:
        values: `(N, ...)`, any dtype.
        offsets: `(num_outer * J + 1,)` int64, non-decreasing, from 0 to N: row (i, j) is the one at `i * J + j`.
        num_outer: The number of lines of the grid, at least 1.

    Returns:
        Values `(N, ...)` and offsets like those given. Gradients flow to `values`.
    """
    check_values(values)
    check_offsets(offsets)
    check_devices(values, offsets=offsets)
    num_rows = offsets.shape[0] - 1
    if num_outer < 1 or num_rows % num_outer:
        raise ValueError(f"num_outer must be at least 1 and divide the {num_rows} rows, got {num_outer}")
    return _keyed_transpose(values, offsets, num_outer, impl)


def reference(values: Tensor, offsets: Tensor, num_outer: int) -> tuple[Tensor, Tensor]:
    """The definition: the rows in the order of the transposed grid."""
    rows = torch.arange(offsets.shape[0] - 1, device=offsets.device)
    return permute_rows(values, offsets, rows.view(num_outer, -1).t().flatten(), values.shape[0])


def _run(values: Tensor, offsets: Tensor, num_outer: int, impl: Impl) -> tuple[Tensor, Tensor]:
    check_ends(offsets, values.shape[0])
    if resolve_impl(impl, values) == "reference":
        return reference(values, offsets, num_outer)
    from fs_kernels.jagged_permute_triton import keyed_transpose_triton

    return keyed_transpose_triton(values, offsets, num_outer)


def _fake(values: Tensor, offsets: Tensor, num_outer: int, impl: Impl) -> tuple[Tensor, Tensor]:
    return values.new_empty(values.shape), torch.empty_like(offsets)


class _Context(FunctionCtx):
    saved_tensors: tuple[Tensor, ...]
    num_inner: int
    impl: Impl


def _setup_context(ctx: _Context, inputs: tuple[Tensor, Tensor, int, Impl], output: tuple[Tensor, Tensor]) -> None:
    _, offsets, num_outer, ctx.impl = inputs
    ctx.num_inner = max((offsets.shape[0] - 1) // num_outer, 1)
    ctx.save_for_backward(output[1])


def _backward(ctx: _Context, grad: Tensor, _: Tensor) -> tuple[Tensor, None, None, None]:
    return _keyed_transpose(grad, *ctx.saved_tensors, ctx.num_inner, ctx.impl)[0], None, None, None


_keyed_transpose = register(
    "keyed_transpose(Tensor values, Tensor offsets, SymInt num_outer, str impl) -> (Tensor, Tensor)",
    _run,
    fake=_fake,
    backward=_backward,
    setup_context=_setup_context,
)
