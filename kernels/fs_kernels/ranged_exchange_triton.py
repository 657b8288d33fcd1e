"""`ranged_dispatch` and `ranged_combine` in Triton: a plan of what lies where in the buffer, then one copy of it all.

A range is what a block holds of one key. Without an index it is one piece of its column, and the rows of `_copy_triton`
are the R * F ranges. With one, they are the F * n rows of all samples, in the order of the buffer.

Legend: R ranks, C columns, F keys of all columns, B samples of the batch, n samples that are exchanged.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from fs_kernels._copy_triton import copy_rows
from fs_kernels._launch import jit, launch
from fs_kernels._words import narrowest_word, value_bytes

_BLOCK = 256
_PLACED_BY_ONE = 1 << 14  # ranges: up to here one program adds them up, which saves launches
_COLUMNS = 16  # taken by one launch: each is an argument, and code of its own that takes time to compile


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


@jit
def _lengths_kernel(
    offsets, forms, index, ends, n: tl.int64, B: tl.int64, first_key: tl.int64, C: tl.constexpr, BLOCK: tl.constexpr
):
    """`ends[f, j + 1]` becomes the number of values of key f of sample `index[j]`."""
    j = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    live = j < n
    sample = tl.load(index + j, live, other=0)
    line = ends + (n + 1) * first_key
    for c in tl.static_range(C):
        row = offsets[c] + sample
        for _ in range(_num_keys(forms[c])):
            length = tl.load(row + 1, live, other=0) - tl.load(row, live, other=0)
            tl.store(line + 1 + j, length, live)
            tl.store(line + j, length * 0, j == 0)
            line += n + 1
            row += B


@triton.jit
def _padded(num_bytes):
    return (num_bytes + 15) // 16 * 16


@jit
def _ranges_kernel(
    offsets, addresses, forms, ends, bounds, given, blocks, cuts, starts, sizes,
    n: tl.int64, B: tl.int64, R: tl.int64, F: tl.int64, first_key: tl.int64, ITEM: tl.int64,
    C: tl.constexpr, PLACE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Where ranges begin, in `cuts`, and blocks, in `blocks`, by one program; else only their bytes.

    Without `ends` ranges are the rows to copy. With `given` blocks begin there.
    """
    if PLACE:
        begin = R * 0
        stop = R
    else:
        begin = tl.program_id(0).to(tl.int64) * BLOCK
        stop = begin + 1
    everything = R * 0
    for first_rank in range(begin, stop, BLOCK):
        r = first_rank + tl.arange(0, BLOCK)
        live = r < R
        a = tl.load(bounds + r, live, other=0)
        b = tl.load(bounds + r + 1, live, other=0)
        place = tl.zeros((BLOCK,), tl.int64)
        if PLACE:
            if given is None:
                line = ends
                for c in tl.static_range(C):
                    row = offsets[c]
                    for _ in range(_num_keys(forms[c])):
                        if ends is not None:
                            row = line
                            line += n + 1
                        values = tl.load(row + b, live, other=0) - tl.load(row + a, live, other=0)
                        place += values * _width(forms[c])
                        row += B
                    place = _padded(place)
                place = everything + tl.cumsum(place, 0) - place
            else:
                place = tl.load(given + r, live, other=0) * ITEM
            tl.store(blocks + r, place // ITEM, live)
        cut = r * F + first_key
        line = ends
        if ends is not None:
            line += (n + 1) * first_key
        for c in tl.static_range(C):
            row = offsets[c]
            width = _width(forms[c])
            size = tl.zeros((BLOCK,), tl.int64)
            for _ in range(_num_keys(forms[c])):
                if ends is not None:
                    row = line
                    line += n + 1
                first = tl.load(row + a, live, other=0)
                size = (tl.load(row + b, live, other=0) - first) * width
                if ends is None:
                    tl.store(starts + cut, addresses[c] + _remainder(forms[c]) + first * width, live)
                    tl.store(sizes + cut, size, live)
                if PLACE:
                    tl.store(cuts + cut, place, live)
                else:
                    tl.store(cuts + cut + 1, size, live)
                place += size
                row += B
                cut += 1
            gap = _padded(place) - place
            if not PLACE:  # the column's last key takes the gap behind it
                tl.store(cuts + cut, size + gap, live)
            place += gap
        if PLACE:
            everything = tl.max(tl.where(live, place, 0), 0)
    if PLACE:
        if given is not None:
            everything = tl.load(given + R) * ITEM
        tl.store(blocks + R, everything // ITEM)
        tl.store(cuts + R * F, everything)
    elif tl.program_id(0) == 0:
        tl.store(cuts, everything)


@jit
def _rows_kernel(
    offsets, addresses, forms, ends, bounds, index, cuts, row_ends, starts, sizes,
    n: tl.int64, B: tl.int64, R: tl.int64, F: tl.int64, first_key: tl.int64,
    C: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Where the values of every key of sample `index[j]` lie in the buffer and in their column, and their bytes."""
    j = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    live = j < n
    sample = tl.load(index + j, live, other=0)
    rank = tl.zeros((BLOCK,), tl.int64)
    span = R - 1
    while span > 0:
        half = (span + 1) // 2
        later = live & (rank + half < R)
        later = later & (tl.load(bounds + rank + half, later, other=0) <= j)
        rank = tl.where(later, rank + half, rank)
        span //= 2
    a = tl.load(bounds + rank, live, other=0)
    count = tl.load(bounds + rank + 1, live, other=0) - a
    row = a * F + count * first_key + j - a
    cut = rank * F + first_key
    line = ends + (n + 1) * first_key
    for c in tl.static_range(C):
        at = offsets[c] + sample
        width = _width(forms[c])
        for _ in range(_num_keys(forms[c])):
            before = tl.load(line + j, live, other=0)
            packed = before - tl.load(line + a, live, other=0)
            tl.store(row_ends + row, tl.load(cuts + cut, live, other=0) + packed * width, live)
            tl.store(starts + row, addresses[c] + _remainder(forms[c]) + tl.load(at, live, other=0) * width, live)
            tl.store(sizes + row, (tl.load(line + j + 1, live, other=0) - before) * width, live)
            row += count
            cut += 1
            line += n + 1
            at += B


@dataclass(frozen=True)
class _Plan:
    """The rows that `copy_rows` takes, where ranges begin, `(R * F + 1,)` bytes, and blocks, `(R + 1,)` elements."""

    ends: Tensor
    starts: Tensor
    sizes: Tensor
    cuts: Tensor
    blocks: Tensor


def _plan(
    values: list[Tensor],
    offsets: list[Tensor],
    num_keys: list[int],
    bounds: Tensor,
    index: Tensor | None,
    given: Tensor | None,
    item: int,
) -> _Plan:
    """`given` is where blocks must begin, in elements of `item` bytes."""
    offsets, bounds = [o.contiguous() for o in offsets], bounds.contiguous()
    index = None if index is None else index.contiguous()
    given = None if given is None else given.contiguous()
    new, device = bounds.new_empty, bounds.device
    R, F, B = len(bounds) - 1, sum(num_keys), (len(offsets[0]) - 1) // num_keys[0]
    n = 0 if index is None else len(index)
    num_rows = R * F if index is None else n * F
    cuts, blocks, starts, sizes = new(R * F + 1), new(R + 1), new(num_rows), new(num_rows)
    chunks = list(_chunks(values, offsets, num_keys))
    by_sample = triton.cdiv(max(n, 1), _BLOCK)

    ends = None
    if index is not None:
        ends = new(F, n + 1)
        for columns, first, aligned in chunks:
            args = (columns[0], columns[2], index, ends, n, B, first)
            variant = (index.dtype, aligned)
            launch(_lengths_kernel, by_sample, args, (len(aligned), _BLOCK), device=device, variant=variant)
        torch.cumsum(ends, 1, out=ends)

    place = R * F <= _PLACED_BY_ONE and len(chunks) == 1
    for columns, first, aligned in chunks:
        args = (*columns, ends, bounds, given, blocks, cuts, starts, sizes, n, B, R, F, first, item)
        constants = (len(aligned), place, _BLOCK)
        num_programs = 1 if place else triton.cdiv(max(R, 1), _BLOCK)
        variant = (ends is None, given is None, aligned)
        launch(_ranges_kernel, num_programs, args, constants, device=device, variant=variant)
    if not place:
        torch.cumsum(cuts, 0, out=cuts)
        if given is not None:
            ranges = cuts[:-1].view(R, F)
            ranges += (given[:-1] * item - ranges[:, 0])[:, None]
            cuts[-1] = given[-1] * item
        torch.div(cuts[::F], item, rounding_mode="floor", out=blocks)
    if ends is None:
        return _Plan(cuts, starts, sizes, cuts, blocks)

    row_ends = new(num_rows)
    for columns, first, aligned in chunks:
        args = (*columns, ends, bounds, index, cuts, row_ends, starts, sizes, n, B, R, F, first)
        variant = (index.dtype, aligned)
        launch(_rows_kernel, by_sample, args, (len(aligned), _BLOCK), device=device, variant=variant)
    return _Plan(row_ends, starts, sizes, cuts, blocks)


_Columns = tuple[tuple[Tensor, ...], tuple[int, ...], tuple[int, ...]]


def _chunks(
    values: list[Tensor], offsets: list[Tensor], num_keys: list[int]
) -> Iterator[tuple[_Columns, int, tuple[bool, ...]]]:
    """Offsets, addresses and forms of up to so many columns; their first key; and whose offsets are aligned."""
    first_key = 0
    for i in range(0, len(values), _COLUMNS):
        some, keys, mine = values[i : i + _COLUMNS], num_keys[i : i + _COLUMNS], offsets[i : i + _COLUMNS]
        # That of no values is 0, for which Triton would take 32 bits to be enough.
        addresses = tuple(v.data_ptr() & ~15 or 1 << 40 for v in some)
        forms = tuple(_form(v, k) for v, k in zip(some, keys, strict=True))
        yield (tuple(mine), addresses, forms), first_key, tuple(o.data_ptr() % 16 == 0 for o in mine)
        first_key += sum(keys)


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
    plan = _plan(values, offsets, num_keys, bounds, index, block_offsets, dtype.itemsize)
    if out_size is None:
        out_size = int(plan.blocks[-1])
    new = torch.empty if len(plan.starts) else torch.zeros
    blocks = new(out_size, dtype=dtype, device=bounds.device)
    copy_rows(blocks, plan.ends, plan.starts, plan.sizes, scale=1, words=_words(values, index), pack=True)
    return blocks, plan.blocks


def combine_triton(
    blocks: Tensor,
    out: list[Tensor],
    offsets: list[Tensor],
    num_keys: list[int],
    bounds: Tensor,
    index: Tensor | None,
    block_offsets: Tensor | None,
) -> None:
    plan = _plan(out, offsets, num_keys, bounds, index, block_offsets, blocks.element_size())
    copy_rows(blocks, plan.ends, plan.starts, plan.sizes, scale=1, words=_words(out, index), pack=False)


def _words(values: list[Tensor], index: Tensor | None) -> tuple[int, ...]:
    """The widths to move by: each column's own, and wider ones for ranges, which are long and may be aligned."""
    own = {narrowest_word(v) for v in values}
    return tuple(w for w in (1, 2, 4, 8, 16) if w in own or (index is None and w > min(own)))
