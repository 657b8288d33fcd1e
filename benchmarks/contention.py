"""What communication costs the computation beside it (the paper's Figure 10), on one GPU that two processes share.

    python -m benchmarks.contention --json

Rank 0 computes; rank 1 only takes part in exchanges, launches no kernel, and is alive in every case. Cases, in random
order in each round: alone, alone once more (the control), beside AllToAlls of 64 MiB a rank by our group in either
mode, and beside a kernel of 8 to 32 thread blocks that copies the same bytes at the same rate. A slowdown compares with
the alone of the same round; bounds hold 95 of 100 medians of resampled rounds. The computation is one CUDA graph, timed
by events, and samples in which the traffic ended before the computation are left out. All bytes of both ranks pass
through the memory of the one GPU here; where each rank has its own, half of them do.
"""

import argparse
import math
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

import fs_comm
from benchmarks.report import publish, row

MIB = 1 << 20
EXCHANGE_BYTES = 64 * MIB
WORK_S = 0.012
CTAS = (8, 16, 32)
MODES = {"ours, streams wait": "1", "ours, thread waits": "0"}
CASES = ("alone", "control", *MODES, *(f"copy kernel, {n} blocks" for n in CTAS))
COMPUTE_BOUND, MEMORY_BOUND = "compute-bound", "memory-bound"
BARS = {COMPUTE_BOUND: 0.01, MEMORY_BOUND: 0.03}


@dataclass(frozen=True)
class Work:
    name: str
    bound: str
    make: Callable[[], Callable[[], Any]]


def product(num_rows: int, width: int) -> Callable[[], Any]:
    a, b = (torch.randn(n, width, dtype=torch.bfloat16, device="cuda") for n in (num_rows, width))
    out = torch.empty(num_rows, width, dtype=torch.bfloat16, device="cuda")
    return lambda: torch.mm(a, b, out=out)


def attention(max_length: int, width: int) -> Callable[[], Any]:
    """Causal, over histories of lognormal lengths."""
    g = torch.Generator().manual_seed(max_length)
    lengths = (torch.randn(64, generator=g).exp() * max_length / 4).clamp(16, max_length).int()
    lengths = lengths[: max(1, int((lengths.cumsum(0) <= 64_000).sum()))]
    offsets = torch.cat([torch.zeros(1, dtype=torch.int32), lengths.cumsum(0).int()]).cuda()
    q, k, v = (torch.randn(int(lengths.sum()), width // 64, 64, dtype=torch.bfloat16, device="cuda") for _ in range(3))
    longest = int(lengths.max())
    forward = torch.ops.aten._flash_attention_forward
    return lambda: forward(q, k, v, offsets, offsets, longest, longest, 0.0, True, False)


def addition(num_bytes: int) -> Callable[[], Any]:
    a, b, out = (torch.ones(num_bytes // 4, device="cuda") for _ in range(3))
    return lambda: torch.add(a, b, out=out)


WORKS = [
    Work("product, 32768 x 1024", COMPUTE_BOUND, lambda: product(32768, 1024)),
    Work("product, 8192 x 8192", COMPUTE_BOUND, lambda: product(8192, 8192)),
    Work("attention, 2048, 256", COMPUTE_BOUND, lambda: attention(2048, 256)),
    Work("attention, 2048, 1024", COMPUTE_BOUND, lambda: attention(2048, 1024)),
    Work("attention, 8192, 256", COMPUTE_BOUND, lambda: attention(8192, 256)),
    Work("attention, 8192, 1024", COMPUTE_BOUND, lambda: attention(8192, 1024)),
    Work("addition, 3 x 512 MiB", MEMORY_BOUND, lambda: addition(512 * MIB)),
]


class Rank:
    """What both processes have: a group for each mode, and buffers to exchange."""

    def __init__(self, rank: int, folder: str) -> None:
        torch.cuda.set_device(0)
        store = dist.FileStore(f"{folder}/store", 2)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=60))
        self.source = torch.randint(0, 1 << 40, (EXCHANGE_BYTES // 8,), device="cuda")
        self.out, self.spare = torch.empty_like(self.source), torch.empty_like(self.source)
        self.groups: dict[str, dist.ProcessGroup] = {}
        self.num_exchanges: dict[str, int] = {}
        self.gb_per_s = 0.0
        for mode, waits in MODES.items():
            os.environ["FS_COMM_STREAM_WAITS"] = waits
            self.groups[mode] = fs_comm.new_group(timeout_s=30)
            self._calibrate(mode)

    def _calibrate(self, mode: str) -> None:
        """So many exchanges that they outlast the computation, by what is left when the last was asked for."""
        for num in (4, 16):
            dist.barrier()
            torch.cuda.synchronize()
            started = time.perf_counter()
            last = self.exchange(mode, num)
            asked = time.perf_counter() - started
            while not last.is_completed():
                time.sleep(0.0001)
            seconds = torch.tensor([time.perf_counter() - started, asked], dtype=torch.float64) / num
        dist.all_reduce(seconds, dist.ReduceOp.MAX)
        each, asking = seconds.tolist()
        self.num_exchanges[mode] = min(60, 2 + math.ceil(2 * WORK_S / max(each - asking, each / 8)))
        if not self.gb_per_s:  # the kernel's rate is that of the first mode; both ranks' bytes
            self.gb_per_s = 2 * EXCHANGE_BYTES / each / 1e9

    def exchange(self, mode: str, num: int) -> dist.Work:
        works = [
            dist.all_to_all_single(self.out, self.source, group=self.groups[mode], async_op=True) for _ in range(num)
        ]
        assert works[-1] is not None
        return works[-1]


def peer(folder: str, num_samples: int, seed: int) -> None:
    """Rank 1: its part of the exchanges, in the same random order, and nothing else."""
    rank = Rank(1, folder)
    for case in order(num_samples, seed):
        dist.barrier()
        if case in MODES:
            rank.exchange(case, rank.num_exchanges[case])
        torch.cuda.synchronize()
        dist.barrier()


def order(num_rounds: int, seed: int) -> list[str]:
    """Cases of all works and rounds; the first round of a work warms up."""
    g = np.random.default_rng(seed)
    return [str(case) for _ in WORKS for _ in range(num_rounds + 1) for case in g.permutation(CASES)]


def computes(folder: str, num_rounds: int, seed: int) -> None:
    """Rank 0: saves seconds by work, case and round under `folder`; NaN where the traffic ended too soon."""
    from benchmarks.sm_copy_triton import device_seconds, paced_copy

    rank = Rank(0, folder)
    side = torch.cuda.Stream()
    arguments = {"gb_per_s": rank.gb_per_s, "seconds": 4 * WORK_S}
    paced_copy(rank.source, rank.spare, num_ctas=CTAS[0], **arguments)  # compiles
    torch.cuda.synchronize()
    held = {n: round(4 * WORK_S / device_seconds(rank.source, rank.spare, num_ctas=n, **arguments), 3) for n in CTAS}
    cases = iter(order(num_rounds, seed))
    found: dict[str, dict[str, list[float]]] = {}
    for work in WORKS:
        graph = repeated(work.make())
        for r in range(num_rounds + 1):
            for _ in CASES:
                case = next(cases)
                start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                dist.barrier()
                last = None
                if case in MODES:
                    last = rank.exchange(case, rank.num_exchanges[case])
                elif case.startswith("copy kernel"):
                    with torch.cuda.stream(side):
                        paced_copy(rank.source, rank.spare, num_ctas=int(case.split()[2]), **arguments)
                        last = torch.cuda.Event()
                        last.record()
                    time.sleep(0.001)  # its blocks are there first, as those of a collective that waits would be
                start.record()
                graph.replay()
                stop.record()
                stop.synchronize()
                outlasted = last is None or not (
                    last.query() if isinstance(last, torch.cuda.Event) else last.is_completed()
                )
                seconds = start.elapsed_time(stop) / 1e3 if outlasted else math.nan
                if r:
                    found.setdefault(work.name, {}).setdefault(case, []).append(seconds)
                torch.cuda.synchronize()
                dist.barrier()
        del graph
    torch.save((found, rank.gb_per_s, held), f"{folder}/found")


def repeated(run: Callable[[], Any]) -> torch.cuda.CUDAGraph:
    """So many runs that they take about `WORK_S`, as one graph."""
    for _ in range(20):
        run()
    start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(10):
        run()
    stop.record()
    stop.synchronize()
    num = max(1, round(WORK_S / (start.elapsed_time(stop) / 1e4)))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(num):
            run()
    return graph


def bounds(ratios: np.ndarray, seed: int = 0) -> tuple[float, float, float]:
    """The median, and the 95 % bounds of it over resampled rounds."""
    g = np.random.default_rng(seed)
    medians = np.median(g.choice(ratios, (2000, len(ratios))), axis=1)
    return float(np.median(ratios)), *np.percentile(medians, (2.5, 97.5)).tolist()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("needs a CUDA device: torch.cuda.is_available() is False")
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        ranks = [context.Process(target=f, args=(folder, options.rounds, 1)) for f in (computes, peer)]
        for process in ranks:
            process.start()
        try:
            ranks[0].join(600)
        finally:
            for process in ranks:
                process.kill()
        if ranks[0].exitcode:
            return 1
        found, gb_per_s, held = torch.load(Path(folder, "found"))
    rows, figures, bars = [row("exchange", "64 MiB a rank", "both ranks' bytes, each way", "GB/s", gb_per_s)], {}, {}
    for work in WORKS:
        alone = np.array(found[work.name]["alone"])
        rows.append(row("alone", work.name, "ms", "ms", 1e3 * alone))
        for case in CASES[1:]:
            ratios = np.array(found[work.name][case]) / alone
            ratios = ratios[~np.isnan(ratios)]
            if not len(ratios):
                continue
            middle, low, high = bounds(ratios)
            rows.append(row(case, work.name, "slowdown", "%", 100 * (ratios - 1)))
            figures.setdefault(work.name, {})[case] = {
                "slowdown": round(middle - 1, 4),
                "bounds": [round(low - 1, 4), round(high - 1, 4)],
                "samples": len(ratios),
            }
            if case in MODES:
                bars[f"{case}: {work.name} within {BARS[work.bound]:.0%}"] = middle - 1 <= BARS[work.bound]
    publish(
        "contention",
        rows,
        {"slowdowns": figures, "gb_per_s": round(gb_per_s, 1), "kernel_rate_held": held, "bars": bars},
        as_json=options.json,
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
