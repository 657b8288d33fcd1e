"""The core of every kernel that moves rows: bytes between a packed array and rows that lie anywhere.

A packed array holds rows back to back. A program copies one tile of it, a fixed number of bytes, whatever rows they
belong to: short rows share a program and long ones spread over many, so the load on a GPU's processors does not depend
on the lengths. Which row a word belongs to is found by search among the rows of its tile, and every tile moves in the
widest words that its rows allow.

Legend: M rows; `packed` is the packed array's address. Row m is packed from byte `ends[m] * SCALE` on, up to where the
next one is, and lies at the address `starts[m]`. With `sizes`, only so many bytes of it exist: what else is packed
is a gap, and filled with zeros.
"""

import triton
import triton.language as tl
from torch import Tensor

from fs_kernels._launch import jit, launch

_TILE = 8192  # bytes: amortises the search, and still fills the processors with a few megabytes
_LANES = 512  # words in flight in a program: with more, fewer programs fit a processor
_WARPS = 4
_BLOCK = 128
_TILES_SEARCHED_BEFORE = 2048  # from here on a launch that finds each tile's rows costs less than a search in each tile


@triton.jit
def last_at_or_before(ends, first, stop, x):
    """The last m from `first` to `stop - 1` with `ends[m] <= x`; `first` where there is none."""
    PROBES: tl.constexpr = 128  # looked at in one step
    while stop - first > 1:
        step = (stop - first + PROBES - 1) // PROBES
        probe = first + tl.arange(0, PROBES) * step
        found = (probe < stop) & (tl.load(ends + probe, probe < stop, other=0) <= x)
        first += tl.maximum(tl.sum(found.to(tl.int32)) - 1, 0) * step
        stop = tl.minimum(stop, first + step)
    return first


@triton.jit
def _widest_word(ends, starts, sizes, row, last, SCALE):
    """The widest of 16, 8, 4, 2 and 1 bytes by which rows `row` to `last` can be moved."""
    ROWS: tl.constexpr = 256
    word = tl.full((), 16, tl.int64)
    for first in range(row, last + 1, ROWS):
        m = first + tl.arange(0, ROWS)
        live = m <= last
        size = tl.load(sizes + m, live, other=0)
        bits = tl.load(ends + m, live, other=0) * SCALE | tl.load(starts + m, live, other=0) | size | 16
        bits = tl.where(size > 0, bits, 16)  # an empty row may lie anywhere
        word = tl.minimum(word, tl.min(bits & -bits))
    return word


@triton.jit
def _copy_words(
    packed,
    ends,
    starts,
    sizes,
    row,
    last,
    first,
    stop,
    SCALE,
    WORD: tl.constexpr,
    LANES: tl.constexpr,
    PACK: tl.constexpr,
):
    """Bytes `first` to `stop - 1` of the packed rows `row` to `last`, in words of WORD bytes."""
    two: tl.constexpr = 2 if WORD == 16 else 1
    kind: tl.constexpr = tl.int64 if WORD >= 8 else tl.int32 if WORD == 4 else tl.int16 if WORD == 2 else tl.int8
    last_in_tile = (last - row).to(tl.int32)
    ends += row
    starts += row
    for begin in range(first, stop, LANES * WORD):
        at = begin + tl.arange(0, LANES) * WORD  # (LANES,) bytes
        live = at < stop
        m = tl.zeros((LANES,), tl.int32)  # counted from the tile's first row
        width = last_in_tile
        while width > 0:
            half = (width + 1) // 2
            later = live & (m + half <= last_in_tile)
            later = later & (tl.load(ends + m + half, later, other=0) * SCALE <= at)
            m = tl.where(later, m + half, m)
            width //= 2
        within = at - tl.load(ends + m, live, other=0) * SCALE
        place = tl.load(starts + m, live, other=0) + within
        real = live
        if sizes is not None:
            real = live & (within >= 0) & (within < tl.load(sizes + row + m, live, other=0))
        here = at // WORD * two
        there = place // WORD * two
        if two == 2:
            here = here[:, None] + tl.arange(0, 2)[None, :]  # (LANES, 2)
            there = there[:, None] + tl.arange(0, 2)[None, :]
            live = live[:, None]
            real = real[:, None]
        # Triton moves 16 bytes at once if it sees that they are aligned, which it does in sums with aligned pointers.
        here += tl.multiple_of(packed.to(tl.pointer_type(kind)), WORD)
        there += tl.multiple_of(tl.full((), 0, tl.int64).to(tl.pointer_type(kind)), WORD)
        if PACK:
            tl.store(here, tl.load(there, real, other=0), live)
        else:
            tl.store(there, tl.load(here, real, other=0), real)


@jit
def _copy_kernel(
    packed: tl.int64, ends, starts, sizes, tile_rows, num_rows: tl.int64, num_bytes: tl.int64, SCALE: tl.int64,
    WORDS: tl.constexpr, TILE: tl.constexpr, LANES: tl.constexpr, PACK: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(0).to(tl.int64) * TILE
    stop = tl.minimum(first + TILE, num_bytes)
    if tile_rows is None:
        row = last_at_or_before(ends, tl.full((), 0, tl.int64), num_rows, first // SCALE)
        last = last_at_or_before(ends, row, num_rows, (stop - 1) // SCALE)
    else:
        row = tl.load(tile_rows + tl.program_id(0))
        last = tl.load(tile_rows + tl.program_id(0) + 1)
    if len(WORDS) == 1:
        _copy_words(packed, ends, starts, sizes, row, last, first, stop, SCALE, WORDS[0], LANES, PACK)
    else:
        widest = _widest_word(ends, starts, sizes, row, last, SCALE)
        word = widest * 0 + WORDS[0]
        for i in tl.static_range(1, len(WORDS)):
            word = tl.where(widest >= WORDS[i], WORDS[i], word)
        for i in tl.static_range(len(WORDS)):
            if word == WORDS[i]:
                _copy_words(packed, ends, starts, sizes, row, last, first, stop, SCALE, WORDS[i], LANES, PACK)


@jit
def _tile_rows_kernel(
    ends, tile_rows, num_rows: tl.int64, num_bytes: tl.int64, num_tiles: tl.int64, SCALE: tl.int64,
    TILE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The row of each tile's first byte, and that of the last byte of all."""
    tile = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)  # (BLOCK,)
    live = tile <= num_tiles
    x = tl.minimum(tile * TILE, num_bytes - 1) // SCALE
    row = tl.zeros((BLOCK,), tl.int64)
    width = num_rows - 1
    while width > 0:
        half = (width + 1) // 2
        later = live & (row + half < num_rows)
        later = later & (tl.load(ends + row + half, later, other=0) <= x)
        row = tl.where(later, row + half, row)
        width //= 2
    tl.store(tile_rows + tile, row, live)


def copy_rows(
    packed: Tensor,
    ends: Tensor,
    starts: Tensor,
    sizes: Tensor | None,
    *,
    scale: int,
    words: tuple[int, ...],
    pack: bool,
) -> None:
    """Copies all rows into the contiguous `packed`, or where `pack` is False, from there to where they lie.

    `ends`, `starts` and `sizes` `(M,)` int64 are in values of `scale` bytes, addresses, and bytes. `words` are the
    widths in bytes to choose from for each tile, ascending; any row can be moved by the first.
    """
    num_bytes = packed.numel() * packed.element_size()
    if not num_bytes or not len(starts):
        return
    num_tiles = triton.cdiv(num_bytes, _TILE)
    tile_rows = None
    if num_tiles >= _TILES_SEARCHED_BEFORE:
        tile_rows = ends.new_empty(num_tiles + 1)
        launch(
            _tile_rows_kernel,
            triton.cdiv(num_tiles + 1, _BLOCK),
            (ends, tile_rows, len(starts), num_bytes, num_tiles, scale),
            (_TILE, _BLOCK),
            device=packed.device,
        )
    launch(
        _copy_kernel,
        num_tiles,
        (packed.data_ptr(), ends, starts, sizes, tile_rows, len(starts), num_bytes, scale),
        (words, _TILE, _LANES, pack),
        device=packed.device,
        variant=(sizes is None, tile_rows is None),
        num_warps=_WARPS,
    )
