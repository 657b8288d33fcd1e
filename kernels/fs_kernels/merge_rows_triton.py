"""`merge_rows` in Triton: every row is read once, from where it is, and written once.

Legend: N output rows, D features.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

_TILE = 4096  # elements of a program


@triton.jit(do_not_specialize=["N"])
def _merge_kernel(first, second, source, out, N, D, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr):
    n = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)  # (BLOCK_N,)
    d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)[None, :]  # (1, BLOCK_D)
    row = tl.load(source + n, n < N, other=0)[:, None]
    live = (n < N)[:, None] & (d < D)
    is_first = row >= 0
    a = tl.load(first + row * D + d, live & is_first)
    b = tl.load(second + ~row * D + d, live & (row < 0))
    tl.store(out + n[:, None] * D + d, tl.where(is_first, a, b), live)


def merge_rows_triton(first: Tensor, second: Tensor, source: Tensor) -> Tensor:
    if first.is_complex():  # Triton knows no complex numbers
        pairs = merge_rows_triton(*(torch.view_as_real(x).flatten(1) for x in (first, second)), source)
        return torch.view_as_complex(pairs.unflatten(1, (first.shape[1], 2)))
    N, D = len(source), first.shape[1]
    out = first.new_empty(N, D)
    if out.numel():
        block_d = min(128, triton.next_power_of_2(D))
        block_n = min(256, _TILE // block_d)
        _merge_kernel[(triton.cdiv(N, block_n), triton.cdiv(D, block_d))](
            first.contiguous(), second.contiguous(), source.contiguous(), out, N, D, BLOCK_N=block_n, BLOCK_D=block_d
        )
    return out
