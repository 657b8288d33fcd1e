"""`merge_rows` in Triton: every row is read once, from where it is, and written once.

Legend: N output rows, D features.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from fs_kernels._launch import launch
from fs_kernels._rows_triton import feature_blocks, program_of, variant_of
from fs_kernels._words import dense

_TILE = 2048  # elements of a program


@triton.jit(do_not_specialize=["N"])
def _merge_kernel(
    first, second, source, out, N: tl.int64, D: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr
):  # fmt: skip
    tile, d = program_of(D, BLOCK_D)
    n = tile * BLOCK_N + tl.arange(0, BLOCK_N)  # (BLOCK_N,)
    d = d[None, :]
    row = tl.load(source + n, n < N, other=0).to(tl.int64)[:, None]
    live = (n < N)[:, None] & (d < D)
    is_first = row >= 0
    a = tl.load(first + row * D + d, live & is_first)
    b = tl.load(second + ~row * D + d, live & (row < 0))
    tl.store(out + n[:, None] * D + d, tl.where(is_first, a, b), live)


def merge_rows_triton(first: Tensor, second: Tensor, source: Tensor) -> Tensor:
    first, second, source = dense(first), dense(second), source.contiguous()
    if first.is_complex():  # Triton knows no complex numbers
        pairs = merge_rows_triton(*(torch.view_as_real(x).flatten(1) for x in (first, second)), source)
        return torch.view_as_complex(pairs.unflatten(1, (first.shape[1], 2)))
    N, D = len(source), first.shape[1]
    out = first.new_empty(N, D)
    if out.numel():
        num_d, block_d = feature_blocks(D)
        block_n = min(256, _TILE // block_d)
        launch(
            _merge_kernel, triton.cdiv(N, block_n) * num_d, (first, second, source, out, N), (D, block_n, block_d),
            device=out.device, variant=variant_of(first, second, source),
        )  # fmt: skip
    return out
