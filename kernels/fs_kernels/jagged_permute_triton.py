"""`jagged_permute` and `keyed_transpose` in Triton: a plan of where the rows go, then one copy.

Legend: M output rows.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from fs_kernels._copy_triton import copy_rows
from fs_kernels._launch import jit, launch
from fs_kernels._words import dense, narrowest_word, value_bytes

_BLOCK = 1024
_ONE_PROGRAM = 16 * _BLOCK  # up to here one program adds up all lengths, which saves a launch


@jit
def _plan_kernel(
    address: tl.int64, offsets, index, ends, starts, M: tl.int64, num_outer: tl.int64, SCALE: tl.int64,
    TRANSPOSE: tl.constexpr, ADD_UP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Each row's address, and in `ends[m + 1]` its length, or with ADD_UP the sum of its length and those before."""
    if ADD_UP:
        begin = M * 0
        stop = M
    else:
        begin = tl.program_id(0).to(tl.int64) * BLOCK
        stop = begin + 1
    total = tl.full((), 0, tl.int64)
    for first in range(begin, stop, BLOCK):
        m = first + tl.arange(0, BLOCK)  # (BLOCK,)
        live = m < M
        if TRANSPOSE:
            row = (m % num_outer) * (M // num_outer) + m // num_outer
        else:
            row = tl.load(index + m, live, other=0)
        start = tl.load(offsets + row, live, other=0)
        length = tl.load(offsets + row + 1, live, other=0) - start
        tl.store(starts + m, address + start * SCALE, live)
        if ADD_UP:
            tl.store(ends + 1 + m, total + tl.cumsum(length, 0), live)
            total += tl.sum(length, 0)
        else:
            tl.store(ends + 1 + m, length, live)
    if tl.program_id(0) == 0:
        tl.store(ends, tl.full((), 0, tl.int64))


def _plan(
    values: Tensor, offsets: Tensor, index: Tensor | None, num_outer: int, num_rows: int
) -> tuple[Tensor, Tensor]:
    """`(M + 1,)` offsets of the output, and `(M,)` the address from which each row comes.

    Row m is row `index[m]`, or where `index` is None, that of the transpose of a grid of `num_outer` lines.
    """
    ends, starts = offsets.new_empty(num_rows + 1), offsets.new_empty(num_rows)
    add_up = num_rows <= _ONE_PROGRAM
    launch(
        _plan_kernel,
        1 if add_up else triton.cdiv(num_rows, _BLOCK),
        (values.data_ptr(), offsets, index, ends, starts, num_rows, num_outer, value_bytes(values)),
        (index is None, add_up, _BLOCK),
        device=values.device,
        variant=(None if index is None else index.dtype,),
    )
    if not add_up:
        torch.cumsum(ends, 0, out=ends)
    return ends, starts


def _gather(values: Tensor, ends: Tensor, starts: Tensor, out_size: int) -> Tensor:
    out = values.new_empty(out_size, *values.shape[1:])
    copy_rows(out, ends, starts, None, scale=value_bytes(values), words=(narrowest_word(values, out),), pack=True)
    return out


def jagged_permute_triton(
    values: Tensor, offsets: Tensor, index: Tensor, out_size: int | None
) -> tuple[Tensor, Tensor]:
    values, offsets, index = dense(values), offsets.contiguous(), index.contiguous()
    ends, starts = _plan(values, offsets, index, 1, len(index))
    return _gather(values, ends, starts, int(ends[-1]) if out_size is None else out_size), ends


def keyed_transpose_triton(values: Tensor, offsets: Tensor, num_outer: int) -> tuple[Tensor, Tensor]:
    values, offsets = dense(values), offsets.contiguous()
    ends, starts = _plan(values, offsets, None, num_outer, len(offsets) - 1)
    return _gather(values, ends, starts, len(values)), ends
