"""`jagged_permute` in Triton: each row is copied by a few programs, block after block.

Legend: N' output values, M output rows, W words a value (a word is the widest integer that divides a value's bytes).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from fs_kernels.jagged_permute import source_places

BLOCK = 1024
# Enough programs to fill a GPU where rows are few and long; more than that only adds launches that find nothing to do.
PROGRAMS = 1 << 14
_WORDS = (torch.int64, torch.int32, torch.int16, torch.int8)


@triton.jit
def _forward_kernel(values, offsets, index, out_offsets, out, W, num_parts, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    part = tl.program_id(1)
    start = tl.load(out_offsets + row) * W  # int64: places can pass 2**31
    num_words = tl.load(out_offsets + row + 1) * W - start
    source = tl.load(offsets + tl.load(index + row)) * W
    for first in range(part * BLOCK, num_words, num_parts * BLOCK):
        word = first + tl.arange(0, BLOCK)  # (BLOCK,)
        mask = word < num_words
        tl.store(out + start + word, tl.load(values + source + word, mask), mask)


class _JaggedPermute(torch.autograd.Function):
    @staticmethod
    def forward(ctx, values: Tensor, offsets: Tensor, index: Tensor, out_offsets: Tensor, out_size: int) -> Tensor:
        ctx.save_for_backward(offsets, index, out_offsets)
        ctx.shape = values.shape
        out = values.new_empty(out_size, *values.shape[1:])
        if not out.numel():
            return out
        words = _as_words(values)
        parts = max(1, min(PROGRAMS // len(index), 64))
        _forward_kernel[(len(index), parts)](
            words, offsets, index, out_offsets, _as_words(out), words.numel() // len(values), parts, BLOCK=BLOCK
        )
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):
        offsets, index, out_offsets = ctx.saved_tensors
        source = source_places(offsets, index, out_offsets, len(grad))
        return grad.new_zeros(ctx.shape).index_add(0, source, grad), None, None, None, None


def jagged_permute_triton(values: Tensor, offsets: Tensor, index: Tensor, out_offsets: Tensor, out_size: int) -> Tensor:
    return _JaggedPermute.apply(values.contiguous(), offsets, index, out_offsets, out_size)


def _as_words(x: Tensor) -> Tensor:
    """The same bytes as integers, as wide as a value's size allows: only bits are moved."""
    num_bytes = x.element_size() * x[0].numel()
    word = next(w for w in _WORDS if num_bytes % w.itemsize == 0 and x.data_ptr() % w.itemsize == 0)
    return x.flatten().view(torch.int8).view(word)
