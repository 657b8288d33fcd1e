"""`jagged_permute` in Triton: one pass over the output, each block finding its rows by bisection.

Legend: N' output values, M output rows, W words a value (a word is the widest integer that divides a value's bytes).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from fs_kernels.jagged_permute import source_places

BLOCK = 1024
_WORDS = (torch.int64, torch.int32, torch.int16, torch.int8)


@triton.jit
def _forward_kernel(
    values, offsets, index, out_offsets, out, M, num_words, W, STEPS: tl.constexpr, BLOCK: tl.constexpr
):
    word = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)  # (BLOCK,) places in out
    mask = word < num_words
    n = word // W  # output value
    row = tl.zeros((BLOCK,), tl.int64)  # the last row that starts at or before n, by bisection
    end = row + M
    for _ in range(STEPS):
        middle = (row + end) // 2
        before = tl.load(out_offsets + middle, mask & (middle < M), other=0) <= n
        row = tl.where(before & (middle < M), middle, row)
        end = tl.where(before, end, middle)
    source_row = tl.load(index + row, mask, other=0).to(tl.int64)
    source = tl.load(offsets + source_row, mask, other=0) + n - tl.load(out_offsets + row, mask, other=0)
    tl.store(out + word, tl.load(values + source * W + word % W, mask, other=0), mask)


class _JaggedPermute(torch.autograd.Function):
    @staticmethod
    def forward(ctx, values: Tensor, offsets: Tensor, index: Tensor, out_offsets: Tensor, out_size: int) -> Tensor:
        ctx.save_for_backward(offsets, index, out_offsets)
        ctx.shape = values.shape
        out = values.new_empty(out_size, *values.shape[1:])
        if not out.numel():
            return out
        words = _as_words(values)
        num_words = words.numel() // len(values) * out_size
        grid = (triton.cdiv(num_words, BLOCK),)
        _forward_kernel[grid](
            words,
            offsets,
            index,
            out_offsets,
            _as_words(out),
            len(index),
            num_words,
            num_words // out_size,
            STEPS=len(index).bit_length(),
            BLOCK=BLOCK,
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
