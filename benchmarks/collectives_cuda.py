"""AllGather and AllToAll of CUDA tensors between processes of one host: ours beside gloo and beside bare copies.

    python -m benchmarks.collectives_cuda --ranks 2 --json

Sizes are bytes of a rank's output. The floor is what as many processes take to copy an output to pinned memory and
another one back, both at once and all at once, with one copy each: every byte has to cross the bus twice. Ranks
share GPUs where there are fewer. Each call is timed by itself, from an idle device to an idle device. `--slot-mib` sets
the size of chunks. The trace counts what the device did for one operation of each kind.
"""

import argparse
import multiprocessing
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

import fs_comm
from benchmarks.report import Row, publish, row
from fs_comm import cuda_road

KIB, MIB = 1 << 10, 1 << 20
SIZES = {"64 KiB": 64 * KIB, "1 MiB": MIB, "16 MiB": 16 * MIB, "64 MiB": 64 * MIB, "256 MiB": 256 * MIB}
OPS = ("all_gather", "all_to_all")
MODES = {"streams": "1", "thread": "0"}
BAR_MS = 4.0


def measure(rank: int, num_ranks: int, folder: str, sizes: dict[str, int], slot_mib: list[float], rounds: int) -> None:
    """One rank's seconds of each case, saved under `folder`."""
    torch.set_num_threads(1)
    torch.cuda.set_device(rank % torch.cuda.device_count())
    store = dist.FileStore(f"{folder}/store", num_ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=num_ranks, timeout=timedelta(seconds=60))
    groups: dict[str, dist.ProcessGroup | None] = {"gloo": None}
    for name, waits in MODES.items():
        for mib in slot_mib:
            os.environ["FS_COMM_STREAM_WAITS"], cuda_road.MAX_SLOT_BYTES = waits, int(mib * MIB)
            group = groups[f"{name}, {mib:g} MiB"] = fs_comm.new_group(timeout_s=30)
            gather(torch.empty(num_ranks, device="cuda"), torch.ones(1, device="cuda"), group)
    found: dict[str, list[float]] = {}
    for size_name, num_bytes in sizes.items():
        calls = calls_of(num_bytes, num_ranks, groups)
        for r in range(rounds + 2):  # two warm up
            for name, call in calls.items():
                dist.barrier()
                torch.cuda.synchronize()
                started = time.perf_counter()
                call()
                returned = time.perf_counter() - started
                torch.cuda.synchronize()
                seconds = time.perf_counter() - started
                if r >= 2:
                    found.setdefault(f"{size_name}|{name}", []).append(seconds)
                    found.setdefault(f"{size_name}|{name}|returns", []).append(returned)
    torch.save((found, traced(groups[next(g for g in groups if g != "gloo")])), f"{folder}/found{rank}")
    dist.barrier()


def calls_of(
    num_bytes: int, num_ranks: int, groups: dict[str, dist.ProcessGroup | None]
) -> dict[str, Callable[[], Any]]:
    source = torch.randint(0, 256, (num_bytes,), dtype=torch.uint8, device="cuda")
    out, part = torch.empty_like(source), source[: num_bytes // num_ranks].clone()
    calls: dict[str, Callable[[], Any]] = {"floor": both_ways(source, out)}
    for name, group in groups.items():
        calls[f"all_gather|{name}"] = partial(gather, out, part, group)
        calls[f"all_to_all|{name}"] = partial(dist.all_to_all_single, out, source, group=group)
    return calls


def gather(out: torch.Tensor, part: torch.Tensor, group: dist.ProcessGroup | None) -> None:
    (getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor)(out, part, group=group)


def both_ways(source: torch.Tensor, out: torch.Tensor) -> Callable[[], None]:
    there, back = (torch.empty(len(source), dtype=torch.uint8, pin_memory=True) for _ in range(2))
    other = torch.cuda.Stream()

    def call() -> None:
        there.copy_(source, non_blocking=True)
        with torch.cuda.stream(other):
            out.copy_(back, non_blocking=True)

    return call


def traced(group: dist.ProcessGroup | None) -> dict[str, int]:
    """What the device did for one AllToAll and one AllGather."""
    source = torch.ones(16 * MIB, device="cuda")
    out, part = torch.empty_like(source), source[: len(source) // dist.get_world_size()].clone()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        dist.all_to_all_single(out, source, group=group)
        gather(out, part, group)
        torch.cuda.synchronize()
    events = [e for e in profile.events() or [] if e.device_type == torch.autograd.DeviceType.CUDA]
    return dict(Counter(str(e.name) for e in events))


def summarize(seconds: dict[str, Any], num_ranks: int, sizes: dict[str, int]) -> tuple[list[Row], dict[str, Any]]:
    rows: list[Row] = []
    figures: dict[str, Any] = {}
    for size_name, num_bytes in sizes.items():
        crossing = num_bytes * (num_ranks - 1) / num_ranks  # what a rank does not have already
        floor = seconds[f"{size_name}|floor"]
        rows.append(row("bare copies both ways", size_name, "ms", "ms", 1e3 * floor))
        for op in OPS:
            gloo = seconds[f"{size_name}|{op}|gloo"]
            for case, s in seconds.items():
                size, _, name = case.partition(f"|{op}|")
                if size != size_name or not name or name.endswith("|returns"):
                    continue
                made = [
                    row(f"{op}, {name}", size_name, "ms", "ms", 1e3 * s),
                    row(f"{op}, {name}", size_name, "call_returns_ms", "ms", 1e3 * seconds[f"{case}|returns"]),
                    row(f"{op}, {name}", size_name, "gb_per_s", "GB/s", crossing / s / 1e9),
                    row(f"{op}, {name}", size_name, "ratio_to_gloo", "", gloo / s),
                    row(f"{op}, {name}", size_name, "share_of_floor", "", floor / s),
                ]
                rows += made
                figures.setdefault(op, {}).setdefault(name, {})[size_name] = {r.metric: round(r.p50, 3) for r in made}
    return rows, figures


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES))
    parser.add_argument("--slot-mib", nargs="+", type=float, default=[cuda_road.MAX_SLOT_BYTES / MIB])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("needs a CUDA device: torch.cuda.is_available() is False")
    sizes = {name: SIZES[name] for name in options.sizes}
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        arguments = (options.ranks, folder, sizes, options.slot_mib, options.rounds)
        ranks = [context.Process(target=measure, args=(rank, *arguments)) for rank in range(options.ranks)]
        for process in ranks:
            process.start()
        try:
            for process in ranks:
                process.join(900)
        finally:
            for process in ranks:
                process.kill()
        if any(process.exitcode for process in ranks):
            return 1
        each, traces = zip(*(torch.load(Path(folder, f"found{rank}")) for rank in range(options.ranks)), strict=True)
    seconds = {case: np.max([e[case] for e in each], axis=0) for case in each[0]}  # an operation is done with the last
    rows, figures = summarize(seconds, options.ranks, sizes)
    figures |= {"trace": traces[0], "ranks": options.ranks}
    if options.ranks == 2 and "64 MiB" in sizes:
        best = min(case["64 MiB"]["ms"] for name, case in figures["all_to_all"].items() if name != "gloo")
        figures["bars"] = {f"all_to_all 64 MiB within {BAR_MS} ms": best <= BAR_MS}
    publish(f"collectives_cuda_{options.ranks}", rows, figures, as_json=options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
