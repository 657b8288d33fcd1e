"""One thing that a kernel is timed at, and how it is timed."""

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from types import ModuleType
from typing import Any

import torch
from triton.testing import do_bench

Run = Callable[[], object]

SIZES = (64, 256, 1024)
"""MiB that a case moves, counted once."""


@dataclass(frozen=True, kw_only=True)
class Case:
    kernel: str
    """With what it moves: `jagged_permute, ids`."""
    num_bytes: int
    """The least that must be read and written: what the floor, a copy, takes for as many."""
    ours: Run
    torch: Run
    """The best that we know in torch's own vectorised operations."""
    fbgemm: Run | None = None
    """FBGEMM's operation, where it has one and is installed."""


def device_ms(run: Run) -> list[float]:
    """p20, median and p80 of the device's time; up to some 80 µs of launching hide behind the flush of the cache."""
    return do_bench(run, warmup=20, rep=80, quantiles=[0.2, 0.5, 0.8])


def wall_us(run: Run) -> list[float]:
    """p20, median and p80 of what a call takes when calls follow each other: its launches, or the device's time."""
    samples: list[float] = []
    start = time.perf_counter()
    run()
    torch.cuda.synchronize()
    num_calls = max(1, min(200, int(0.03 / (time.perf_counter() - start))))
    for _ in range(7):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(num_calls):
            run()
        torch.cuda.synchronize()
        samples.append((time.perf_counter() - start) / num_calls * 1e6)
    return torch.tensor(samples, dtype=torch.float64).quantile(torch.tensor([0.2, 0.5, 0.8]).double()).tolist()


def graph_us(run: Run, num_calls: int = 10) -> float:
    """What a call takes when it is replayed in a CUDA graph: the kernels alone."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(num_calls):
            run()
    samples: list[float] = []
    for _ in range(6):
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        stop.record()
        torch.cuda.synchronize()
        samples.append(start.elapsed_time(stop) / num_calls * 1e3)
    return sorted(samples[1:])[2]


def copy_of(num_bytes: int) -> Run:
    """The floor of a case that must move `num_bytes`: a device copy that reads half of them and writes half."""
    source = torch.empty(num_bytes // 2, dtype=torch.uint8, device="cuda").random_()
    target = torch.empty_like(source)
    return lambda: target.copy_(source)


@cache
def fbgemm() -> Any:
    """`torch.ops.fbgemm`, or None where FBGEMM is not installed."""
    found: ModuleType | None = None
    with suppress(ImportError, OSError):
        import fbgemm_gpu as found  # pyright: ignore[reportMissingImports]
    return None if found is None else torch.ops.fbgemm
