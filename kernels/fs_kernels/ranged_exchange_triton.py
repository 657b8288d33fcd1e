"""`ranged_dispatch` and `ranged_combine` in Triton: a plan of what lies where in the buffer, then one copy of it all.

Without an index a section is one range of its column, and the rows of `_copy_triton` are the R * F sections. With one,
they are the F * n rows of all samples, in the order of the buffer.

Legend: R ranks, C columns, F keys of all columns, B samples of the batch, n samples that are exchanged.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from fs_kernels._copy_triton import copy_rows
from fs_kernels._words import narrowest_word, value_bytes

_BLOCK = 256
_COLUMNS = 32  # taken by one launch: every one is an argument, and code of its own


# Triton compiles anew for each pattern of what in a tuple is 1 or divisible by 16, so everything in `columns` is made
# divisible: addresses are rounded down, and the rest of them travels in `forms`.
def _form(values: Tensor, num_keys: int) -> int:
    return num_keys << 36 | value_bytes(values) << 8 | (values.data_ptr() & 15) << 4


@triton.jit
def _num_keys(form):
    return form >> 36


@triton.jit
def _width(form):
    return (form >> 8) & 0xFFFFFFF


@triton.jit
def _remainder(form):
    return (form >> 4) & 15


@triton.jit(do_not_specialize=["n", "B", "first_key"])
def _lengths_kernel(offsets, forms, index, ends, n, B, first_key, C: tl.constexpr, BLOCK: tl.constexpr):
    """`ends[f, j + 1]` becomes the number of values of key f of sample `index[j]`."""
    j = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    live = j < n
    sample = tl.load(index + j, live, other=0)
    line = ends + (tl.full((), 1, tl.int64) + n) * first_key
    for c in tl.static_range(C):
        row = offsets[c] + sample
        for _ in range(_num_keys(forms[c])):
            length = tl.load(row + 1, live, other=0) - tl.load(row, live, other=0)
            tl.store(line + 1 + j, length, live)
            tl.store(line + j, length * 0, j == 0)
            line += n + 1
            row += B


@triton.jit(do_not_specialize=["n", "B", "R", "F", "first_key"])
def _sections_kernel(
    offsets, addresses, forms, ends, bounds, cuts, starts, sizes, n, B, R, F, first_key,
    C: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """`cuts[r * F + f + 1]` becomes the section's bytes with its gap; without `ends` sections are the rows to copy."""
    r = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    live = r < R
    a = tl.load(bounds + r, live, other=0)
    b = tl.load(bounds + r + 1, live, other=0)
    section = r * F + first_key
    for c in tl.static_range(C):
        width = _width(forms[c])
        if ends is None:
            row = offsets[c]
        else:
            row = ends + (tl.full((), 1, tl.int64) + n) * first_key
        for _ in range(_num_keys(forms[c])):
            first = tl.load(row + a, live, other=0)
            size = (tl.load(row + b, live, other=0) - first) * width
            tl.store(cuts + 1 + section, (size + 15) // 16 * 16, live)
            if ends is None:
                tl.store(starts + section, addresses[c] + _remainder(forms[c]) + first * width, live)
                tl.store(sizes + section, size, live)
                row += B
            else:
                row += n + 1
            section += 1
        first_key += _num_keys(forms[c])
    tl.store(cuts + r, r * 0, r == 0)


@triton.jit(do_not_specialize=["n", "B", "R", "F", "first_key"])
def _rows_kernel(
    offsets, addresses, forms, ends, bounds, index, cuts, row_ends, starts, sizes, n, B, R, F, first_key,
    C: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Where the values of every key of sample `index[j]` lie in the buffer and in their column, and their bytes."""
    j = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    live = j < n
    sample = tl.load(index + j, live, other=0)
    rank = tl.zeros((BLOCK,), tl.int64)
    span = tl.full((), -1, tl.int64) + R
    while span > 0:
        half = (span + 1) // 2
        later = live & (rank + half < R)
        later = later & (tl.load(bounds + rank + half, later, other=0) <= j)
        rank = tl.where(later, rank + half, rank)
        span //= 2
    a = tl.load(bounds + rank, live, other=0)
    count = tl.load(bounds + rank + 1, live, other=0) - a
    row = a * F + count * first_key + j - a
    section = rank * F + first_key
    line = ends + (tl.full((), 1, tl.int64) + n) * first_key
    for c in tl.static_range(C):
        at = offsets[c] + sample
        width = _width(forms[c])
        for _ in range(_num_keys(forms[c])):
            before = tl.load(line + j, live, other=0)
            packed = before - tl.load(line + a, live, other=0)
            tl.store(row_ends + row, tl.load(cuts + section, live, other=0) + packed * width, live)
            tl.store(starts + row, addresses[c] + _remainder(forms[c]) + tl.load(at, live, other=0) * width, live)
            tl.store(sizes + row, (tl.load(line + j + 1, live, other=0) - before) * width, live)
            row += count
            section += 1
            line += n + 1
            at += B


@dataclass(frozen=True)
class _Rows:
    """What `copy_rows` takes, and the sections' `(R * F + 1,)` places in the buffer."""

    ends: Tensor
    starts: Tensor
    sizes: Tensor
    cuts: Tensor
    num_keys: int
    """F."""


def _plan(
    values: list[Tensor],
    offsets: list[Tensor],
    num_keys: list[int],
    bounds: Tensor,
    index: Tensor | None,
    block_bytes: Tensor | None,
) -> _Rows:
    R, F, B = len(bounds) - 1, sum(num_keys), (len(offsets[0]) - 1) // num_keys[0]
    new = bounds.new_empty
    cuts = new(R * F + 1)
    chunks = list(_chunks(values, offsets, num_keys))
    by_rank = (triton.cdiv(max(R, 1), _BLOCK),)
    if index is None:
        starts, sizes = new(R * F), new(R * F)
        for columns, (first, C) in chunks:
            _sections_kernel[by_rank](*columns, None, bounds, cuts, starts, sizes, 0, B, R, F, first, C=C, BLOCK=_BLOCK)
        torch.cumsum(cuts, 0, out=cuts)
        _move_blocks(cuts, block_bytes, F)
        return _Rows(cuts, starts, sizes, cuts, F)

    n = len(index)
    by_sample = (triton.cdiv(max(n, 1), _BLOCK),)
    ends, row_ends, starts, sizes = new(F, n + 1), new(n * F), new(n * F), new(n * F)
    for (offs, _, forms), (first, C) in chunks:
        _lengths_kernel[by_sample](offs, forms, index, ends, n, B, first, C=C, BLOCK=_BLOCK)
    torch.cumsum(ends, 1, out=ends)
    for columns, (first, C) in chunks:
        _sections_kernel[by_rank](*columns, ends, bounds, cuts, None, None, n, B, R, F, first, C=C, BLOCK=_BLOCK)
    torch.cumsum(cuts, 0, out=cuts)
    _move_blocks(cuts, block_bytes, F)
    for columns, (first, C) in chunks:
        _rows_kernel[by_sample](
            *columns, ends, bounds, index, cuts, row_ends, starts, sizes, n, B, R, F, first, C=C, BLOCK=_BLOCK
        )
    return _Rows(row_ends, starts, sizes, cuts, F)


_Columns = tuple[tuple[Tensor, ...], tuple[int, ...], tuple[int, ...]]


def _chunks(
    values: list[Tensor], offsets: list[Tensor], num_keys: list[int]
) -> Iterator[tuple[_Columns, tuple[int, int]]]:
    """Offsets, addresses and forms of up to so many columns, their first key, and their number."""
    first_key = 0
    for i in range(0, len(values), _COLUMNS):
        some, keys = values[i : i + _COLUMNS], num_keys[i : i + _COLUMNS]
        addresses = tuple(v.data_ptr() & ~15 for v in some)
        forms = tuple(_form(v, k) for v, k in zip(some, keys, strict=True))
        yield (tuple(offsets[i : i + _COLUMNS]), addresses, forms), (first_key, len(some))
        first_key += sum(keys)


def _move_blocks(cuts: Tensor, block_bytes: Tensor | None, num_keys: int) -> None:
    """Sections packed densely, to the blocks where they must be."""
    if block_bytes is not None:
        sections = cuts[:-1].view(-1, num_keys)
        sections += (block_bytes[:-1] - sections[:, 0])[:, None]
        cuts[-1] = block_bytes[-1]


def dispatch_triton(
    values: list[Tensor],
    offsets: list[Tensor],
    num_keys: list[int],
    bounds: Tensor,
    index: Tensor | None,
    block_offsets: Tensor | None,
    out_size: int | None,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    block_bytes = None if block_offsets is None else block_offsets * dtype.itemsize
    rows = _plan(values, offsets, num_keys, bounds, index, block_bytes)
    if out_size is None:
        out_size = int(rows.cuts[-1]) // dtype.itemsize
    new = torch.empty if len(rows.starts) else torch.zeros
    blocks = new(out_size, dtype=dtype, device=bounds.device)
    copy_rows(blocks, rows.ends, rows.starts, rows.sizes, scale=1, narrowest=narrowest_word(*values), pack=True)
    if block_offsets is None:
        return blocks, rows.cuts[:: rows.num_keys] // dtype.itemsize
    return blocks, block_offsets.clone()


def combine_triton(
    blocks: Tensor,
    out: list[Tensor],
    offsets: list[Tensor],
    num_keys: list[int],
    bounds: Tensor,
    index: Tensor | None,
    block_offsets: Tensor | None,
) -> None:
    block_bytes = None if block_offsets is None else block_offsets * blocks.element_size()
    rows = _plan(out, offsets, num_keys, bounds, index, block_bytes)
    copy_rows(blocks, rows.ends, rows.starts, rows.sizes, scale=1, narrowest=narrowest_word(*out), pack=False)
