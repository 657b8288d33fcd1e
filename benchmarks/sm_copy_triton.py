"""A copy by multiprocessors at a given rate: what communication kernels do while they wait for a network."""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import globaltimer

TILE_BYTES = 64 << 10


@triton.jit
def _paced_copy_kernel(source, out, num_tiles, ns_per_round, num_rounds, TILE: tl.constexpr, STEP: tl.constexpr):
    cta, num_ctas = tl.program_id(0), tl.num_programs(0)
    started = globaltimer()
    for r in range(num_rounds):
        tile = (r * num_ctas + cta) % num_tiles
        for first in range(0, TILE, STEP):
            at = tile.to(tl.int64) * TILE + first + tl.arange(0, STEP)
            tl.store(out + at, tl.load(source + at))
        due = started + (r + 1).to(tl.int64) * ns_per_round
        while globaltimer() < due:  # resident meanwhile, as a kernel that waits for its peer
            pass


def paced_copy(source: Tensor, out: Tensor, *, num_ctas: int, gb_per_s: float, seconds: float) -> None:
    """Copies tiles of `source` to `out`, `(n,)` int64 of equal length, again and again on the current stream."""
    num_tiles = source.numel() * 8 // TILE_BYTES
    ns_per_round = int(num_ctas * TILE_BYTES / gb_per_s)
    num_rounds = max(1, int(seconds * 1e9 / ns_per_round))
    _paced_copy_kernel[(num_ctas,)](
        source, out, num_tiles, ns_per_round, num_rounds, TILE=TILE_BYTES // 8, STEP=2048, num_warps=16
    )


def device_seconds(source: Tensor, out: Tensor, *, num_ctas: int, gb_per_s: float, seconds: float) -> float:
    """How long that takes, to see that the rate is held."""
    start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    paced_copy(source, out, num_ctas=num_ctas, gb_per_s=gb_per_s, seconds=seconds)
    stop.record()
    stop.synchronize()
    return start.elapsed_time(stop) / 1e3
