"""`segment_sum` in Triton: short segments many to a program, long ones in chunks that many programs share.

The tree adds neighbours first. So the sums of a segment's first CHUNK rows, its next CHUNK rows and so on are nodes of
it where CHUNK is a power of two, and what stands above them is the tree of a segment of these sums: the same kernel
again, once for each factor of CHUNK in the longest segment possible. Every addition is the reference's.

Rows that are not there are -0, which leaves the bits of all that it is added to.

Legend: S segments, K summands of all segments, D features.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from fs_kernels._checks import accumulator
from fs_kernels._copy_triton import last_at_or_before

_SHORT = 16  # up to here a segment is one of many in a program
_ROWS = 32  # of a long segment, loaded at once
_CHUNK = 8 * _ROWS  # smaller spreads a long segment wider, larger leaves fewer sums to add and fewer launches
_ONE_LAUNCH = 32 * _ROWS  # up to here a program sums a segment of any length, which takes no plan
_PROGRAMS = 2048  # that share the chunks, whose number only the device knows


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


@triton.jit
def _four(values, index, start, length, k, d, D, absent):
    return _two(values, index, start, length, k, d, D, absent) + _two(values, index, start, length, k + 2, d, D, absent)


@triton.jit
def _eight(values, index, start, length, k, d, D, absent):
    four = _four(values, index, start, length, k, d, D, absent)
    return four + _four(values, index, start, length, k + 4, d, D, absent)


@triton.jit(do_not_specialize=["S"])
def _short_kernel(
    values, offsets, index, out, S, D, absent, SHORT: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_D: tl.constexpr
):  # fmt: skip
    """Segments of up to SHORT rows, 16 at most; the others are left to `_chunk_kernel`."""
    s = tl.program_id(0).to(tl.int64) * BLOCK_S + tl.arange(0, BLOCK_S)  # (BLOCK_S,)
    d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)  # (BLOCK_D,)
    start = tl.load(offsets + s, s < S, other=0)
    length = tl.load(offsets + s + 1, s < S, other=0) - start
    live = (s < S) & (length <= SHORT)
    length = tl.where(live, length, 0)
    longest = tl.max(length, 0)

    # The first 2ⁿ rows and the next 2ⁿ are neighbours in the tree.
    total = _load_rows(values, index, start, length > 0, d, D, absent)
    if longest > 1:
        total += _load_rows(values, index, start + 1, length > 1, d, D, absent)
    if longest > 2:
        total += _two(values, index, start, length, 2, d, D, absent)
    if longest > 4:
        total += _four(values, index, start, length, 4, d, D, absent)
    if longest > 8:
        total += _eight(values, index, start, length, 8, d, D, absent)
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
def _sum_chunk(
    values, index, start, length, d, D, absent, ROW_BITS: tl.constexpr, BLOCK_BITS: tl.constexpr
):  # fmt: skip
    """`(len(d),)`: the sum of rows `start` to `start + length - 1`, at most `2 ** (ROW_BITS + BLOCK_BITS)` of them."""
    acc: tl.constexpr = tl.float64 if values.dtype.element_ty == tl.float64 else tl.float32
    k = _reversed_bits(ROW_BITS)
    block = _reversed_bits(BLOCK_BITS)
    sums = tl.zeros((1 << BLOCK_BITS, d.shape[0]), acc) * absent  # -0 again: tl.full would make it 0
    for b in range(0, tl.cdiv(length, 1 << ROW_BITS)):
        n = k + (b << ROW_BITS)  # (rows,)
        rows = _load_rows(values, index, start + n, n < length, d, D, absent)
        sums = tl.where((block == b)[:, None], _tree(rows, ROW_BITS)[None, :], sums)
    return tl.where(length > 0, _tree(sums, BLOCK_BITS), 0.0)


@triton.jit
def _whole_kernel(
    values, offsets, index, out, D, absent, ROW_BITS: tl.constexpr, BLOCK_BITS: tl.constexpr, BLOCK_D: tl.constexpr
):  # fmt: skip
    """A segment a program."""
    s = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)  # (BLOCK_D,)
    start = tl.load(offsets + s)
    length = tl.load(offsets + s + 1) - start
    total = _sum_chunk(values, index, start, length, d, D, absent, ROW_BITS, BLOCK_BITS)
    tl.store(out + s * D + d, total.to(out.dtype.element_ty), d < D)


@triton.jit(do_not_specialize=["S"])
def _plan_kernel(
    offsets, counts, S, SHORT: tl.constexpr, CHUNK: tl.constexpr, NUM_LEVELS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """In `counts[level, s + 1]`, the chunks of segment s: of its rows, then of the sums of the level before."""
    s = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)  # (BLOCK,)
    length = tl.load(offsets + s + 1, s < S, other=0) - tl.load(offsets + s, s < S, other=0)
    alone: tl.constexpr = 1
    for level in tl.static_range(NUM_LEVELS):
        length = tl.where(length > (SHORT if level == 0 else alone), tl.cdiv(length, CHUNK), 0)
        row = counts + level * (tl.full((), 1, tl.int64) + S)
        tl.store(row + 1 + s, length, s < S)
        if tl.program_id(0) == 0:
            tl.store(row, tl.full((), 0, tl.int64))


@triton.jit(do_not_specialize=["S"])
def _chunk_kernel(
    values, offsets, index, chunks, out, sums, S, D, absent,
    ROW_BITS: tl.constexpr, BLOCK_BITS: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """All chunks, of which segment s has `chunks[s]` to `chunks[s + 1] - 1`; that of an only one is its sum."""
    d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)  # (BLOCK_D,)
    zero = tl.full((), 0, tl.int64)
    for chunk in range(zero + tl.program_id(0), tl.load(chunks + S), zero + tl.num_programs(0)):
        s = last_at_or_before(chunks, zero, zero + S, chunk)
        first = tl.load(chunks + s)
        start = tl.load(offsets + s) + ((chunk - first) << (ROW_BITS + BLOCK_BITS))
        length = tl.minimum(tl.load(offsets + s + 1) - start, 1 << (ROW_BITS + BLOCK_BITS))
        total = _sum_chunk(values, index, start, length, d, D, absent, ROW_BITS, BLOCK_BITS)
        if tl.load(chunks + s + 1) - first == 1:
            tl.store(out + s * D + d, total.to(out.dtype.element_ty), d < D)
        else:
            tl.store(sums + chunk * D + d, total, d < D)


def segment_sum_triton(values: Tensor, offsets: Tensor, index: Tensor | None) -> Tensor:
    values, offsets = values.contiguous(), offsets.contiguous()
    index = None if index is None else index.contiguous()
    S, D = len(offsets) - 1, values.shape[1]
    K = len(values) if index is None else len(index)
    out = values.new_empty(S, D)
    if not out.numel():
        return out
    block_d = min(128, max(4, triton.next_power_of_2(D)))
    num_d = triton.cdiv(D, block_d)
    row_bits, absent = _ROWS.bit_length() - 1, -0.0
    if K <= _ONE_LAUNCH:
        _whole_kernel[(S, num_d)](
            values, offsets, index, out, D, absent,
            ROW_BITS=row_bits, BLOCK_BITS=(_ONE_LAUNCH // _ROWS).bit_length() - 1, BLOCK_D=block_d,
        )  # fmt: skip
        return out

    chunks = _plan(offsets, _num_levels(K))
    block_s = max(16, 2048 // block_d)
    _short_kernel[(triton.cdiv(S, block_s), num_d)](
        values, offsets, index, out, S, D, absent, SHORT=_SHORT, BLOCK_S=block_s, BLOCK_D=block_d
    )
    most = K // _CHUNK + K // _SHORT  # chunks: full ones, and a last one of each segment of more than _SHORT rows
    for level in chunks:
        sums = values.new_empty(most, D, dtype=accumulator(values.dtype))
        _chunk_kernel[(min(most, _PROGRAMS), num_d)](
            values, offsets, index, level, out, sums, S, D, absent,
            ROW_BITS=row_bits, BLOCK_BITS=(_CHUNK // _ROWS).bit_length() - 1, BLOCK_D=block_d,
        )  # fmt: skip
        values, offsets, index, most = sums, level, None, triton.cdiv(most, 2)
    return out


def _num_levels(num_rows: int) -> int:
    """How often chunks are summed until one sum of `num_rows` is left."""
    levels = 0
    while num_rows > 1:
        num_rows, levels = triton.cdiv(num_rows, _CHUNK), levels + 1
    return levels


def _plan(offsets: Tensor, num_levels: int) -> Tensor:
    """`(num_levels, S + 1)`: of each level's chunks, the first of each segment."""
    S = len(offsets) - 1
    counts = offsets.new_empty(num_levels, S + 1)
    _plan_kernel[(triton.cdiv(S, 1024),)](
        offsets, counts, S, SHORT=_SHORT, CHUNK=_CHUNK, NUM_LEVELS=num_levels, BLOCK=1024
    )
    return torch.cumsum(counts, 1, out=counts)
