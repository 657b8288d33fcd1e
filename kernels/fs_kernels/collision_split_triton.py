"""`collision_split` in Triton: the ids of one set go into a hash table, where those of the other are looked up.

Probing is linear, and a slot only ever grows: an id that finds a smaller one in its slot takes its place and carries
that one on. So the table is the same whatever the order in which programs come, and a search may end at the first slot
that holds less.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from fs_kernels._launch import launch
from fs_kernels._rows_triton import variant_of

_BLOCK = 64  # ids of a program of one warp: what has found its slot waits for the slowest of so many
_EMPTY = torch.iinfo(torch.int64).min  # less than all ids; where it is an id itself, the slot past the end is 0


@triton.jit
def _first_slot(x, SLOT_BITS: tl.constexpr):
    x = x.to(tl.uint64, bitcast=True)
    x = (x ^ (x >> 32)) * 0x9E3779B97F4A7C15  # 2⁶⁴ over the golden ratio: neighbours end up far apart
    return (x >> (64 - SLOT_BITS)).to(tl.int64)


@triton.jit(do_not_specialize=["num_ids", "empty"])
def _insert_kernel(ids, table, num_ids: tl.int64, empty: tl.int64, SLOT_BITS: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)  # (BLOCK,)
    x = tl.load(ids + i, i < num_ids, other=0).to(tl.int64)
    tl.store(table + (1 << SLOT_BITS) + tl.zeros_like(i), tl.zeros_like(i), (i < num_ids) & (x == empty))
    open = (i < num_ids) & (x != empty)
    slot = _first_slot(x, SLOT_BITS)
    while tl.max(open.to(tl.int32), 0) > 0:
        held = tl.load(table + slot, open, other=0)  # of an id that occurs often, all but the first stop here
        held = tl.where(held < x, tl.atomic_max(table + slot, x, open & (held < x), sem="relaxed"), held)
        open = open & (held != x) & (held != empty)
        x = tl.where(open, tl.minimum(x, held), x)
        slot = (slot + 1) & ((1 << SLOT_BITS) - 1)


@triton.jit(do_not_specialize=["num_ids", "empty"])
def _look_up_kernel(ids, table, out, num_ids: tl.int64, empty: tl.int64, SLOT_BITS: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)  # (BLOCK,)
    x = tl.load(ids + i, i < num_ids, other=0).to(tl.int64)
    slot = _first_slot(x, SLOT_BITS)
    held = tl.load(table + slot, i < num_ids, other=0)
    open = (i < num_ids) & (held > x)
    while tl.max(open.to(tl.int32), 0) > 0:
        slot = (slot + 1) & ((1 << SLOT_BITS) - 1)
        held = tl.where(open, tl.load(table + slot, open, other=0), held)
        open = open & (held > x)
    there = tl.load(table + (1 << SLOT_BITS) + tl.zeros_like(i)) != empty
    tl.store(out + i, tl.where(x == empty, there, held == x), i < num_ids)


def fill_table(other: Tensor) -> Tensor:
    """The hash table of `other`: a power of two slots, at most half of them taken, and one more, see `_EMPTY`."""
    slot_bits = max(4, (2 * len(other) - 1).bit_length())
    table = torch.full(((1 << slot_bits) + 1,), _EMPTY, dtype=torch.int64, device=other.device)
    launch(
        _insert_kernel, triton.cdiv(len(other), _BLOCK), (other, table, len(other), _EMPTY), (slot_bits, _BLOCK),
        device=table.device, variant=variant_of(other), num_warps=1,
    )  # fmt: skip
    return table


def collision_split_triton(ids: Tensor, other: Tensor) -> Tensor:
    if not len(ids) or not len(other):
        return ids.new_zeros(len(ids), dtype=torch.bool)
    ids, table = ids.contiguous(), fill_table(other.contiguous())
    out = ids.new_empty(len(ids), dtype=torch.bool)
    slot_bits = (len(table) - 1).bit_length() - 1
    launch(
        _look_up_kernel, triton.cdiv(len(ids), _BLOCK), (ids, table, out, len(ids), _EMPTY), (slot_bits, _BLOCK),
        device=out.device, variant=variant_of(ids), num_warps=1,
    )  # fmt: skip
    return out
