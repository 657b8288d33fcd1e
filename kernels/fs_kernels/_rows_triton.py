"""What kernels on rows of D features share: which features a program takes, and what their code depends on."""

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def program_of(D: tl.constexpr, BLOCK_D: tl.constexpr):
    """Which tile of rows this program takes, and which features of it `(BLOCK_D,)`; those from D on are none."""
    num_blocks = tl.cdiv(D, BLOCK_D)
    i = tl.program_id(0).to(tl.int64)
    return i // num_blocks, i % num_blocks * BLOCK_D + tl.arange(0, BLOCK_D)


def feature_blocks(D: int) -> tuple[int, int]:
    """How many programs share the features of a tile of rows, and how many features each takes."""
    block_d = min(128, triton.next_power_of_2(D))
    return triton.cdiv(D, block_d), block_d


def variant_of(*tensors: Tensor | None) -> tuple[tuple[torch.dtype, bool] | None, ...]:
    """What Triton compiles code for: dtypes, and whether vectors of 16 bytes can be read. See `launch`."""
    return tuple(None if x is None else (x.dtype, x.data_ptr() % 16 == 0) for x in tensors)
