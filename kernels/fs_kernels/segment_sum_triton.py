"""`segment_sum` in Triton: short segments many to a program, long ones in chunks that many programs share.

The tree adds neighbours first. So the sums of a segment's first CHUNK rows, its next CHUNK rows and so on are nodes of
it where CHUNK is a power of two, and what stands above them is the tree of a segment of these sums. Every addition is
the reference's, and all bits are.

Rows that are not there are -0, which leaves the bits of all that it is added to.

Legend: S segments, K summands of all segments, D features.
"""

import triton
import triton.language as tl
from torch import Tensor

from fs_kernels._checks import accumulator
from fs_kernels._copy_triton import last_at_or_before
from fs_kernels._launch import launch
from fs_kernels._rows_triton import feature_blocks, program_of, variant_of
from fs_kernels._words import dense

_SHORT = 4  # rows of a segment that is one of many in a program
_ROWS = 32  # of a long segment, loaded at once
_CHUNK = 4 * _ROWS  # rows that a program sums: fewer spread a long segment wider, more leave fewer sums to add
_JOINED = 4 * _ROWS  # sums of chunks, loaded at once: a single program joins those of a segment
_ONE_LAUNCH = 8192  # up to so many summands a program takes a whole segment, whatever its length
_SHARERS = 4096  # programs that share the chunks, whose number only the device knows

_PLANNED = 1024  # segments of a program that plans


@triton.jit
def _load_rows(values, index, places, live, d, D, absent):
    """`(len(places), len(d))` in the accumulator's dtype; `absent` where not `live`."""
    acc: tl.constexpr = tl.float64 if values.dtype.element_ty == tl.float64 else tl.float32
    row = places
    if index is not None:
        row = tl.load(index + places, live, other=0).to(tl.int64)
    return tl.load(values + row[:, None] * D + d[None, :], live[:, None] & (d < D)[None, :], other=absent).to(acc)


@triton.jit
def _two(values, index, start, length, k, d, D, absent):
    one = _load_rows(values, index, start + k, k < length, d, D, absent)
    return one + _load_rows(values, index, start + k + 1, k + 1 < length, d, D, absent)


@triton.jit(do_not_specialize=["S"])
def _plan_kernel(
    offsets, counts, long, first_chunks, S: tl.int64, SHORT: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Lists the `long` segments, of more than SHORT rows, with the first chunk of each.

    `counts` holds the number of long segments, and below it the number of their chunks in 32 bits; so whoever adds to
    it comes after the same others in both. In which order they come changes where sums lie, but none of them.
    """
    s = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)  # (BLOCK,)
    length = tl.load(offsets + s + 1, s < S, other=0) - tl.load(offsets + s, s < S, other=0)
    is_long = (length > SHORT).to(tl.int64)
    chunks = tl.cdiv(length, CHUNK) * is_long
    before = tl.atomic_add(counts, tl.sum((is_long << 32) + chunks, 0), sem="relaxed")
    entry = (before >> 32) + tl.cumsum(is_long, 0) - is_long
    tl.store(long + entry, s, is_long > 0)
    tl.store(first_chunks + entry, (before & 0xFFFFFFFF) + tl.cumsum(chunks, 0) - chunks, is_long > 0)


@triton.jit
def _sum_short(
    values, offsets, index, out, tile, S, D, d, absent, SHORT: tl.constexpr, BLOCK_S: tl.constexpr
):  # fmt: skip
    """A tile of segments, but for its long ones; what is short has 4 rows at most."""
    s = tile * BLOCK_S + tl.arange(0, BLOCK_S)  # (BLOCK_S,)
    start = tl.load(offsets + s, s < S, other=0)
    length = tl.load(offsets + s + 1, s < S, other=0) - start
    live = (s < S) & (length <= SHORT)
    length = tl.where(live, length, 0)
    total = _two(values, index, start, length, 0, d, D, absent) + _two(values, index, start, length, 2, d, D, absent)
    total = tl.where((length > 0)[:, None], total, 0.0)
    tl.store(out + s[:, None] * D + d[None, :], total.to(out.dtype.element_ty), live[:, None] & (d < D)[None, :])


@triton.jit
def _reversed_bits(NUM_BITS: tl.constexpr):
    """`(2 ** NUM_BITS,)`: 0, 1, … with their binary digits turned round."""
    i = tl.arange(0, 1 << NUM_BITS)
    turned = tl.zeros_like(i)
    for bit in tl.static_range(NUM_BITS):
        turned = turned * 2 + (i >> bit) % 2
    return turned


@triton.jit
def _tree(x, NUM_BITS: tl.constexpr):
    """`(D,)` from `(2 ** NUM_BITS, D)`, where the order of `_reversed_bits` makes neighbours lie half the rows apart:
    in a thread's own registers."""
    for _ in tl.static_range(NUM_BITS):
        x = tl.sum(tl.reshape(x, (2, x.shape[0] // 2, x.shape[1])), 0)  # of two, so no order is left open
    return tl.reshape(x, (x.shape[1],))


@triton.jit
def _row_of(x, i, absent):
    """`(D,)`: row i of `x`; adding -0 to it changes nothing."""
    return tl.sum(tl.where((tl.arange(0, x.shape[0]) == i)[:, None], x, absent), 0)


@triton.jit
def _sum_rows(values, index, start, length, d, D, absent, ROW_BITS: tl.constexpr, LEVELS: tl.constexpr):
    """`(len(d),)`: the tree's sum of rows `start` to `start + length - 1`, in blocks of `2 ** ROW_BITS`.

    As in counting with binary digits, level n holds the sum of the last 2ⁿ blocks that wait for as many more.
    """
    acc: tl.constexpr = tl.float64 if values.dtype.element_ty == tl.float64 else tl.float32
    k = _reversed_bits(ROW_BITS)
    waiting = tl.zeros((LEVELS, d.shape[0]), acc)
    num_blocks = tl.cdiv(length, 1 << ROW_BITS)
    for b in range(0, num_blocks):
        n = k + (b << ROW_BITS)  # (rows,)
        total = _tree(_load_rows(values, index, start + n, n < length, d, D, absent), ROW_BITS)
        level = 0
        while (b >> level) % 2 == 1:
            total = _row_of(waiting, level, absent) + total
            level += 1
        waiting = tl.where((tl.arange(0, LEVELS) == level)[:, None], total[None, :], waiting)

    total = tl.zeros((d.shape[0],), acc) * absent  # -0, which tl.full would make 0
    level = 0
    while (num_blocks >> level) > 0:
        if (num_blocks >> level) % 2 == 1:
            total = _row_of(waiting, level, absent) + total
        level += 1
    return tl.where(length > 0, total, 0.0)


@triton.jit
def _whole_kernel(
    values, offsets, index, out, absent,
    D: tl.constexpr, ROW_BITS: tl.constexpr, LEVELS: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """A segment a program."""
    s, d = program_of(D, BLOCK_D)
    start = tl.load(offsets + s)
    length = tl.load(offsets + s + 1) - start
    total = _sum_rows(values, index, start, length, d, D, absent, ROW_BITS, LEVELS)
    tl.store(out + s * D + d, total.to(out.dtype.element_ty), d < D)


@triton.jit
def _sum_chunk(
    values, offsets, index, long, first_chunks, out, sums, num_long, chunk, D, d, absent,
    CHUNK: tl.constexpr, ROW_BITS: tl.constexpr, LEVELS: tl.constexpr,
):  # fmt: skip
    """A chunk of a long segment; the sum of an only one is its segment's."""
    entry = last_at_or_before(first_chunks, tl.full((), 0, tl.int64), num_long, chunk)
    s = tl.load(long + entry)
    start, stop = tl.load(offsets + s), tl.load(offsets + s + 1)
    begin = start + (chunk - tl.load(first_chunks + entry)) * CHUNK
    total = _sum_rows(values, index, begin, tl.minimum(stop - begin, CHUNK), d, D, absent, ROW_BITS, LEVELS)
    if stop - start <= CHUNK:
        tl.store(out + s * D + d, total.to(out.dtype.element_ty), d < D)
    else:
        tl.store(sums + chunk * D + d, total, d < D)


@triton.jit(do_not_specialize=["S", "num_sharers", "stride"])
def _sum_kernel(
    values, offsets, index, counts, long, first_chunks, out, sums, absent, S: tl.int64, num_sharers: tl.int64,
    stride: tl.int64, D: tl.constexpr, SHORT: tl.constexpr, CHUNK: tl.constexpr, ROW_BITS: tl.constexpr,
    LEVELS: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Every `stride`-th program shares in the chunks, the others take a tile of short segments each: chunks wait for
    memory more than they load it, so the two are best off side by side."""
    i, d = program_of(D, BLOCK_D)
    if (i % stride == 0) & (i // stride < num_sharers):
        num = tl.load(counts)
        for chunk in range(i // stride, num & 0xFFFFFFFF, num_sharers):
            _sum_chunk(
                values, offsets, index, long, first_chunks, out, sums, num >> 32, chunk, D, d, absent,
                CHUNK, ROW_BITS, LEVELS,
            )  # fmt: skip
    else:
        tile = i - tl.minimum(tl.cdiv(i, stride), num_sharers)
        _sum_short(values, offsets, index, out, tile, S, D, d, absent, SHORT, BLOCK_S)


@triton.jit(do_not_specialize=["num_sharers"])
def _join_kernel(
    sums, offsets, counts, long, first_chunks, out, absent, num_sharers: tl.int64,
    D: tl.constexpr, CHUNK: tl.constexpr, ROW_BITS: tl.constexpr, LEVELS: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Segments of several chunks, from the chunks' sums."""
    i, d = program_of(D, BLOCK_D)
    for entry in range(i, tl.load(counts) >> 32, num_sharers):
        s = tl.load(long + entry)
        chunks = tl.cdiv(tl.load(offsets + s + 1) - tl.load(offsets + s), CHUNK)
        if chunks > 1:
            first = tl.load(first_chunks + entry)
            total = _sum_rows(sums, None, first, chunks, d, D, absent, ROW_BITS, LEVELS)
            tl.store(out + s * D + d, total.to(out.dtype.element_ty), d < D)


def segment_sum_triton(values: Tensor, offsets: Tensor, index: Tensor | None) -> Tensor:
    values, offsets = dense(values), offsets.contiguous()
    index = None if index is None else index.contiguous()
    S, D = len(offsets) - 1, values.shape[1]
    K = len(values) if index is None else len(index)
    out = values.new_empty(S, D)
    if not out.numel():
        return out
    num_d, block_d = feature_blocks(D)
    row_bits, absent, device = _ROWS.bit_length() - 1, -0.0, out.device
    variant = variant_of(values, offsets, index)
    if K <= _ONE_LAUNCH:
        launch(
            _whole_kernel, S * num_d, (values, offsets, index, out, absent), (D, row_bits, 16, block_d),
            device=device, variant=variant,
        )  # fmt: skip
        return out

    most_long = K // (_SHORT + 1)
    most_chunks = K // _CHUNK + most_long  # full ones, and the last one of each
    counts = offsets.new_zeros(1)
    long, first_chunks = offsets.new_empty(most_long), offsets.new_empty(most_long)
    sums = values.new_empty(most_chunks, D, dtype=accumulator(values.dtype))
    launch(
        _plan_kernel, triton.cdiv(S, _PLANNED), (offsets, counts, long, first_chunks, S), (_SHORT, _CHUNK, _PLANNED),
        device=device, variant=variant,
    )  # fmt: skip
    block_s = min(256, max(16, 2048 // block_d))
    num_tiles, num_sharers = triton.cdiv(S, block_s), max(1, min(most_chunks, _SHARERS))
    num_programs = num_tiles + num_sharers
    levels = triton.next_power_of_2((_CHUNK // _ROWS).bit_length())
    launch(
        _sum_kernel,
        num_programs * num_d,
        (values, offsets, index, counts, long, first_chunks, out, sums, absent, S, num_sharers,
         num_programs // num_sharers),
        (D, _SHORT, _CHUNK, row_bits, levels, block_s, block_d),
        device=device, variant=variant,
    )  # fmt: skip
    if K > _CHUNK and most_long:
        num_sharers = min(most_long, _SHARERS)
        launch(
            _join_kernel, num_sharers * num_d,
            (sums, offsets, counts, long, first_chunks, out, absent, num_sharers),
            (D, _CHUNK, _JOINED.bit_length() - 1, 32, block_d), device=device, variant=variant, num_warps=8,
        )  # fmt: skip
    return out
