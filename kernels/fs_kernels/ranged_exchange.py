"""Samples into one send buffer, a block for each rank, and out of received blocks: the two sides of an AllToAll.

A block holds a section for each column: the values of its samples, back to back, key after key, so that it is itself a
column of these samples. Sections begin at multiples of 16 bytes, and what is left up to the next one is zero. So a
section can be viewed in its column's dtype, columns of different dtypes travel together, and equal samples give equal
bytes.

Legend: R ranks, C columns, F keys of all columns, B samples of the batch, n samples that are exchanged, P elements of
the buffer.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from fs_kernels._checks import check_bounds, check_devices, check_ends, check_index, check_offsets, check_values
from fs_kernels._dispatch import Impl, resolve_impl
from fs_kernels._library import register
from fs_kernels._words import dense
from fs_kernels.jagged_permute import offsets_of, source_places
from fs_kernels.ranged_reference import ALIGNMENT, buffer_dtype, reference_combine, reference_dispatch

JaggedValues = tuple[Tensor, Tensor | None]
"""Values `(N, ...)` and offsets `(K * B + 1,)` int64, where row (k, b) of K keys, key-major as in TorchRec's
KeyedJaggedTensor, is `values[offsets[k * B + b]:offsets[k * B + b + 1]]`; None where each row is one value."""


def ranged_dispatch(
    columns: Sequence[JaggedValues],
    bounds: Tensor,
    *,
    index: Tensor | None = None,
    num_keys: Sequence[int] | None = None,
    block_offsets: Tensor | None = None,
    out_size: int | None = None,
    impl: Impl = "auto",
) -> tuple[Tensor, Tensor]:
    """The samples that go to each rank, cut out of a batch's columns into one buffer with a block for each rank.

    Args:
        columns: C columns of the same B samples, on one device, of any dtypes.
        bounds: `(R + 1,)` int64, non-decreasing from 0 to n: rank r gets samples `bounds[r]` to `bounds[r + 1] - 1`.
        index: `(n,)` int32 or int64: which samples of the batch those are; they may repeat or be left out. None where
            they are the batch's own, in order.
        num_keys: Keys of each column; None for one each.
        block_offsets: `(R + 1,)` int64 from 0 to P: where the blocks must begin, where both sides have agreed on that;
            in elements that come to multiples of 16 bytes, with room for what the blocks hold. None packs them densely.
        out_size: P, where the caller knows it: saves waiting for the device.

    Returns:
        The buffer `(P,)`, in the dtype of the columns where they agree and uint8 where they do not, and the
        `block_offsets` `(R + 1,)` int64, in its elements. Gradients flow to columns of a common dtype.
    """
    values, offsets, keys = _check_columns(columns, num_keys)
    _check_ranges(values, offsets, bounds, index, block_offsets)
    return _dispatch(values, offsets, keys, bounds, index, block_offsets, out_size, impl)


def ranged_combine(
    blocks: Tensor,
    like: Sequence[JaggedValues],
    bounds: Tensor,
    *,
    index: Tensor | None = None,
    num_keys: Sequence[int] | None = None,
    block_offsets: Tensor | None = None,
    out_sizes: Sequence[int] | None = None,
    impl: Impl = "auto",
) -> list[Tensor]:
    """The columns whose samples came in blocks from each rank: what `ranged_dispatch` takes apart with these arguments.

    Args:
        blocks: `(P,)`, as `ranged_dispatch` lays them out.
        like: For each column that comes out a tensor of its dtype and `(*, ...)` shape, such as `values[:0]`, and its
            offsets `(K * B + 1,)` from 0 to N; or None where each row is one value, and where no column has offsets as
            many values as come out.
        bounds: `(R + 1,)` int64, non-decreasing from 0 to n: how many samples are in each block.
        index: `(n,)` int32 or int64, distinct: which sample of the output each one becomes; the others are zero. None
            for the order in which they came, and n is B then.
        num_keys: Keys of each column; None for one each.
        block_offsets: `(R + 1,)` int64, where blocks begin, in elements of `blocks`; None where they are dense.
        out_sizes: N of each column, where the caller knows them: saves waiting for the device.

    Returns:
        Values `(N, ...)` of each column. Gradients flow to `blocks`.
    """
    values, offsets, keys = _check_columns(like, num_keys, are_empty=True)
    _check_ranges(values, offsets, bounds, index, block_offsets)
    check_devices(bounds, blocks=blocks)
    if blocks.dim() != 1 or blocks.shape[0] * blocks.element_size() % ALIGNMENT:
        raise ValueError(f"blocks must be (P,) of a multiple of {ALIGNMENT} bytes, got {tuple(blocks.shape)}")
    if blocks.dtype != buffer_dtype(values):
        raise ValueError(f"blocks must be {buffer_dtype(values)}, as these columns' are, got {blocks.dtype}")
    if out_sizes is not None and len(out_sizes) != len(values):
        raise ValueError(f"out_sizes must be one number for each of {len(values)} columns, got {list(out_sizes)}")
    num_samples = (offsets[0].shape[0] - 1) // keys[0]
    zero = index is not None and index.shape[0] < num_samples
    sizes = None if out_sizes is None else list(out_sizes)
    return _combine(blocks, values, offsets, keys, bounds, index, block_offsets, sizes, zero, impl)


# ---- checks ---------------------------------------------------------------------------------------------------------


def _check_columns(
    columns: Sequence[JaggedValues], num_keys: Sequence[int] | None, *, are_empty: bool = False
) -> tuple[list[Tensor], list[Tensor], list[int]]:
    """Values, offsets and numbers of keys. Where columns `are_empty`, one without offsets has the others' samples."""
    if not columns:
        raise ValueError("there must be at least one column, got none")
    keys = [1] * len(columns) if num_keys is None else list(num_keys)
    if len(keys) != len(columns) or min(keys) < 1:
        raise ValueError(f"num_keys must be one number from 1 on for each of {len(columns)} columns, got {keys}")
    values: list[Tensor] = []
    offsets: list[Tensor] = []
    counts: list[int] = []
    given = [(o.shape[0] - 1) // k for (_, o), k in zip(columns, keys, strict=True) if o is not None]
    for i, ((v, o), k) in enumerate(zip(columns, keys, strict=True)):
        check_values(v, f"values of column {i}")
        if o is None:
            num_rows = given[0] * k if are_empty and given else v.shape[0]
            o = torch.arange(num_rows + 1, device=v.device)
        check_offsets(o, f"offsets of column {i}")
        values.append(dense(v))
        offsets.append(o)
        counts.append((o.shape[0] - 1) // k)
        if (o.shape[0] - 1) % k or counts[-1] != counts[0]:
            raise ValueError(
                f"offsets of column {i} must be ({k} keys * {counts[0]} samples + 1,), got {tuple(o.shape)}"
            )
    return values, offsets, keys


def _check_ranges(
    values: list[Tensor], offsets: list[Tensor], bounds: Tensor, index: Tensor | None, block_offsets: Tensor | None
) -> None:
    check_offsets(bounds, "bounds")
    check_devices(bounds, index=index, block_offsets=block_offsets)
    for v, o in zip(values, offsets, strict=True):
        check_devices(bounds, values=v, offsets=o)
    if index is not None:
        check_index(index)
    if block_offsets is not None:
        check_offsets(block_offsets, "block_offsets")
        if block_offsets.shape != bounds.shape:
            raise ValueError(
                f"block_offsets must be (R + 1,) as bounds are, got {tuple(block_offsets.shape)} for "
                f"{bounds.shape[0] - 1} ranks"
            )


def _check_samples(
    offsets: list[Tensor], sizes: list[int], num_keys: list[int], bounds: Tensor, index: Tensor | None, item: int,
    block_offsets: Tensor | None, *, whole: bool,
) -> None:  # fmt: skip
    """The values, on a CPU, of what says where samples lie; `item` is the size of an element of the buffer.

    Columns that are not `whole` may have values that belong to no sample.
    """
    num_samples = (offsets[0].shape[0] - 1) // num_keys[0]
    check_ends(bounds, num_samples if index is None else index.shape[0], "bounds")
    if index is not None:
        check_bounds(index, 0, num_samples)
    for i, (o, n) in enumerate(zip(offsets, sizes, strict=True)):
        check_ends(o, n, f"offsets of column {i}", whole=whole)
    if block_offsets is not None and block_offsets.is_cpu:
        check_ends(block_offsets, int(block_offsets[-1]), "block_offsets")
        if bool((block_offsets * item % ALIGNMENT).any()):
            raise ValueError(
                f"block_offsets must come to multiples of {ALIGNMENT} bytes, got {block_offsets.tolist()} elements of "
                f"{item} bytes"
            )


# ---- the operations -------------------------------------------------------------------------------------------------


def _run_dispatch(
    values: list[Tensor],
    offsets: list[Tensor],
    num_keys: list[int],
    bounds: Tensor,
    index: Tensor | None,
    block_offsets: Tensor | None,
    out_size: int | None,
    impl: Impl,
) -> tuple[Tensor, Tensor]:
    if out_size is not None and out_size * buffer_dtype(values).itemsize % ALIGNMENT:
        raise ValueError(f"out_size must come to a multiple of {ALIGNMENT} bytes, got {out_size} elements")
    sizes, item = [v.shape[0] for v in values], buffer_dtype(values).itemsize
    _check_samples(offsets, sizes, num_keys, bounds, index, item, block_offsets, whole=False)
    if resolve_impl(impl, bounds) == "reference":
        return reference_dispatch(values, offsets, num_keys, bounds, index, block_offsets, out_size)
    from fs_kernels.ranged_exchange_triton import dispatch_triton

    dtype = buffer_dtype(values)
    return dispatch_triton(values, offsets, num_keys, bounds, index, block_offsets, out_size, dtype)


def _fake_dispatch(
    values: list[Tensor],
    offsets: list[Tensor],
    num_keys: list[int],
    bounds: Tensor,
    index: Tensor | None,
    block_offsets: Tensor | None,
    out_size: int | None,
    impl: Impl,
) -> tuple[Tensor, Tensor]:
    size = torch.library.get_ctx().new_dynamic_size() if out_size is None else out_size
    return values[0].new_empty(size, dtype=buffer_dtype(values)), torch.empty_like(bounds)


def _run_combine(
    blocks: Tensor,
    like: list[Tensor],
    offsets: list[Tensor],
    num_keys: list[int],
    bounds: Tensor,
    index: Tensor | None,
    block_offsets: Tensor | None,
    out_sizes: list[int] | None,
    zero: bool,
    impl: Impl,
) -> list[Tensor]:
    if out_sizes is None:
        out_sizes = torch.stack([o[-1] for o in offsets]).tolist()
    item = blocks.element_size()
    _check_samples(offsets, out_sizes, num_keys, bounds, index, item, block_offsets, whole=not zero)
    if index is not None and index.is_cpu and len(index) and int(index.bincount().max()) > 1:
        raise ValueError(f"index must be distinct, got sample {int(index.bincount().argmax())} more than once")
    new = torch.Tensor.new_zeros if zero else torch.Tensor.new_empty
    out = [new(x, (n, *x.shape[1:])) for x, n in zip(like, out_sizes, strict=True)]
    blocks = dense(blocks)
    if blocks.data_ptr() % ALIGNMENT:
        blocks = blocks.clone(memory_format=torch.contiguous_format)
    if resolve_impl(impl, bounds) == "reference":
        reference_combine(blocks, out, offsets, num_keys, bounds, index, block_offsets)
    else:
        from fs_kernels.ranged_exchange_triton import combine_triton

        combine_triton(blocks, out, offsets, num_keys, bounds, index, block_offsets)
    return out


def _fake_combine(
    blocks: Tensor,
    like: list[Tensor],
    offsets: list[Tensor],
    num_keys: list[int],
    bounds: Tensor,
    index: Tensor | None,
    block_offsets: Tensor | None,
    out_sizes: list[int] | None,
    zero: bool,
    impl: Impl,
) -> list[Tensor]:
    sizes = [torch.library.get_ctx().new_dynamic_size() for _ in like] if out_sizes is None else out_sizes
    return [x.new_empty(n, *x.shape[1:]) for x, n in zip(like, sizes, strict=True)]


class _Context(FunctionCtx):
    saved_tensors: tuple[Tensor, ...]
    like: list[Tensor]
    num_keys: list[int]
    sizes: list[int]
    """N of each column."""
    size: int
    """P."""
    impl: Impl


def _save(
    ctx: _Context,
    like: list[Tensor],
    offsets: list[Tensor],
    bounds: Tensor,
    index: Tensor | None,
    block_offsets: Tensor | None,
) -> None:
    ctx.like = [x.detach()[:0] for x in like]
    saved = (bounds, index, block_offsets, *offsets)
    ctx.save_for_backward(*saved)  # pyright: ignore[reportArgumentType]: None is saved too


def _saved(ctx: _Context) -> tuple[Tensor, Tensor | None, Tensor | None, list[Tensor]]:
    bounds, index, block_offsets, *offsets = ctx.saved_tensors
    return bounds, index, block_offsets, offsets


def _setup_dispatch(
    ctx: _Context,
    inputs: tuple[list[Tensor], list[Tensor], list[int], Tensor, Tensor | None, Tensor | None, int | None, Impl],
    output: tuple[Tensor, Tensor],
) -> None:
    values, offsets, ctx.num_keys, bounds, index, _, _, ctx.impl = inputs
    ctx.sizes = [v.shape[0] for v in values]
    _save(ctx, values, offsets, bounds, index, output[1])


def _backward_dispatch(ctx: _Context, grad: Tensor, _: Tensor) -> tuple[list[Tensor] | list[None] | None, ...]:
    bounds, index, block_offsets, offsets = _saved(ctx)
    nothing = ([None] * len(offsets), *(None,) * 6)  # for the arguments after `values`; a list for a list
    if index is None:
        grads = _combine(grad, ctx.like, offsets, ctx.num_keys, bounds, None, block_offsets, ctx.sizes, True, ctx.impl)
        return grads, *nothing
    # Samples may be in several blocks: they come out in the order of the blocks, and then each adds to its own.
    rows = [_rows_of(index, k, o) for o, k in zip(offsets, ctx.num_keys, strict=True)]
    ends = [offsets_of(o.diff().index_select(0, r)) for o, r in zip(offsets, rows, strict=True)]
    came = _combine(grad, ctx.like, ends, ctx.num_keys, bounds, None, block_offsets, None, False, ctx.impl)
    grads = [
        x.new_zeros(n, *x.shape[1:]).index_add(0, source_places(o, r, e, x.shape[0]), x)
        for x, n, o, r, e in zip(came, ctx.sizes, offsets, rows, ends, strict=True)
    ]
    return grads, *nothing


def _rows_of(index: Tensor, num_keys: int, offsets: Tensor) -> Tensor:
    """`(K * n,)`: the rows of a column that hold the samples `index`, key-major."""
    num_samples = (offsets.shape[0] - 1) // num_keys
    return (torch.arange(num_keys, device=index.device)[:, None] * num_samples + index).flatten()


def _setup_combine(
    ctx: _Context,
    inputs: tuple[
        Tensor,
        list[Tensor],
        list[Tensor],
        list[int],
        Tensor,
        Tensor | None,
        Tensor | None,
        list[int] | None,
        bool,
        Impl,
    ],
    output: list[Tensor],
) -> None:
    blocks, like, offsets, ctx.num_keys, bounds, index, block_offsets, _, _, ctx.impl = inputs
    ctx.size = blocks.shape[0]
    _save(ctx, like, offsets, bounds, index, block_offsets)


def _backward_combine(ctx: _Context, grads: list[Tensor]) -> tuple[Tensor | list[None] | None, ...]:
    bounds, index, block_offsets, offsets = _saved(ctx)
    grads = [dense(g) for g in grads]
    blocks, _ = _dispatch(grads, offsets, ctx.num_keys, bounds, index, block_offsets, ctx.size, ctx.impl)
    nothing = [None] * len(offsets)
    return blocks, nothing, nothing, *(None,) * 7


_COMMON = "Tensor[] offsets, SymInt[] num_keys, Tensor bounds, Tensor? index, Tensor? block_offsets"

_dispatch = register(
    f"ranged_dispatch(Tensor[] values, {_COMMON}, SymInt? out_size, str impl) -> (Tensor, Tensor)",
    _run_dispatch,
    fake=_fake_dispatch,
    backward=_backward_dispatch,
    setup_context=_setup_dispatch,
)
_combine = register(
    f"ranged_combine(Tensor blocks, Tensor[] like, {_COMMON}, SymInt[]? out_sizes, bool zero, str impl) -> Tensor[]",
    _run_combine,
    fake=_fake_combine,
    backward=_backward_combine,
    setup_context=_setup_combine,
)
