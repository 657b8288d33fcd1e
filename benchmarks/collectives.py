"""AllGather and AllToAll between processes of one host: ours beside gloo and beside the cost of copying the bytes once.

    python -m benchmarks.collectives --ranks 2 --json

Sizes are bytes of a rank's output. The floor is what as many processes take to copy an output out of private memory,
all at once, in the same run; no exchange can do with less. `attach` is the road with a single copy, `staged` the
one with two, for where the kernel refuses to let processes read each other. With an idle main thread the call blocks; a
busy one starts the operation, and computes in pure Python until it is complete: it wants the interpreter all the time.
"""

import argparse
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

import fs_comm
from benchmarks.report import Row, publish, row

KIB, MIB = 1 << 10, 1 << 20
SIZES = {"64 KiB": 64 * KIB, "1 MiB": MIB, "16 MiB": 16 * MIB, "64 MiB": 64 * MIB, "256 MiB": 256 * MIB}
OPS = ("all_gather", "all_to_all")
ROUNDS = 9

Call = Callable[[bool], Any]
"""Does it once; True: returns the work of an operation under way."""


def measure(rank: int, num_ranks: int, folder: str, sizes: dict[str, int]) -> None:
    """One rank's seconds for each case and round, saved under `folder`."""
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", num_ranks)  # pyright: ignore[reportPrivateImportUsage]
    dist.init_process_group("gloo", store=store, rank=rank, world_size=num_ranks, timeout=timedelta(seconds=300))
    groups: dict[str, dist.ProcessGroup | None] = {"gloo": None}
    for road in ("attach", "staged"):
        os.environ["FS_COMM_ATTACH"] = str(int(road == "attach"))
        group = fs_comm.new_group(transports=("shm",), timeout_s=300)
        if group.road == road:  # pyright: ignore[reportAttributeAccessIssue]
            groups[road] = group
    all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # renamed in torch 2.13
    found: dict[str, list[float]] = {}
    for size_name, num_bytes in sizes.items():
        out, source, part = (torch.zeros(n, dtype=torch.uint8) for n in (num_bytes, num_bytes, num_bytes // num_ranks))
        calls: dict[str, Call] = {"floor": lambda _, out=out, source=source: out.copy_(source)}
        for name, group in groups.items():
            calls[f"all_gather|{name}"] = lambda later, out=out, part=part, group=group: all_gather(
                out, part, group=group, async_op=later
            )
            calls[f"all_to_all|{name}"] = lambda later, out=out, source=source, group=group: dist.all_to_all_single(
                out, source, group=group, async_op=later
            )
        repeats = min(50, max(1, 16 * MIB // num_bytes))
        for r in range(ROUNDS + 1):  # the first warms up
            for name, call in calls.items():
                for main_thread in ("idle", "busy"):
                    if name == "floor" and main_thread == "busy":
                        continue
                    dist.barrier()
                    seconds = timed(call, repeats, main_thread == "busy")
                    if r:
                        found.setdefault(f"{size_name}|{main_thread}|{name}", []).append(seconds)
    torch.save(found, f"{folder}/found{rank}")
    dist.barrier()


def timed(call: Call, repeats: int, is_busy: bool) -> float:
    """Seconds of one call."""
    started = time.perf_counter()
    for _ in range(repeats):
        work = call(is_busy)
        while is_busy and not work.is_completed():
            sum(n * n for n in range(100))
    return (time.perf_counter() - started) / repeats


def summarize(seconds: dict[str, Any], num_ranks: int, sizes: dict[str, int]) -> tuple[list[Row], dict[str, Any]]:
    """Rows, and for each size, operation, road and main thread the figures; `seconds`: per case, `(rounds,)`."""
    rows: list[Row] = []
    figures: dict[str, Any] = {}
    for size_name, num_bytes in sizes.items():
        crossing = num_bytes * (num_ranks - 1) / num_ranks  # what a rank does not have already
        floor = seconds[f"{size_name}|idle|floor"]
        rows.append(row("floor", size_name, "copy", "GB/s", num_bytes / floor / 1e9))
        for main_thread in ("idle", "busy"):
            for op in OPS:
                gloo = seconds[f"{size_name}|{main_thread}|{op}|gloo"]
                for road in ("gloo", "attach", "staged"):
                    s = seconds.get(f"{size_name}|{main_thread}|{op}|{road}")
                    if s is None:
                        continue
                    variant = f"{op}, {road}, {main_thread} main thread"
                    made = [
                        row(variant, size_name, "gb_per_s", "GB/s", crossing / s / 1e9),
                        row(variant, size_name, "ratio_to_gloo", "", gloo / s),
                        row(variant, size_name, "share_of_floor", "", floor / s),
                    ]
                    rows += made
                    case = figures.setdefault(op, {}).setdefault(road, {}).setdefault(main_thread, {})
                    case[size_name] = {r.metric: round(r.p50, 3) for r in made}
    return rows, figures


def bars(figures: dict[str, Any], sizes: dict[str, int]) -> dict[str, bool]:
    """Whether the single copy, with an idle main thread, does what it should."""
    held: dict[str, bool] = {}
    for size_name, num_bytes in sizes.items():
        gather, to_all = (figures[op]["attach"]["idle"][size_name] for op in OPS)
        if num_bytes >= 16 * MIB:
            held[f"all_gather {size_name}: 5 x gloo"] = gather["ratio_to_gloo"] >= 5
            held[f"all_to_all {size_name}: 2 x gloo"] = to_all["ratio_to_gloo"] >= 2
            held[f"all_to_all {size_name}: 0.7 of the floor"] = to_all["share_of_floor"] >= 0.7
        elif num_bytes == 64 * KIB:
            held["all_gather 64 KiB: 0.8 x gloo"] = gather["ratio_to_gloo"] >= 0.8
            held["all_to_all 64 KiB: 0.8 x gloo"] = to_all["ratio_to_gloo"] >= 0.8
    return held


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES))
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    sizes = {name: SIZES[name] for name in options.sizes}
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        ranks = [
            context.Process(target=measure, args=(rank, options.ranks, folder, sizes)) for rank in range(options.ranks)
        ]
        for process in ranks:
            process.start()
        try:
            for process in ranks:
                process.join(1800)
        finally:
            for process in ranks:
                process.kill()
        if any(process.exitcode for process in ranks):
            return 1
        each = [torch.load(Path(folder, f"found{rank}")) for rank in range(options.ranks)]
    seconds = {case: np.max([e[case] for e in each], axis=0) for case in each[0]}  # an operation is done with the last
    rows, figures = summarize(seconds, options.ranks, sizes)
    held = bars(figures, sizes) if "attach" in figures["all_gather"] else {}
    publish(
        f"collectives_{options.ranks}",
        rows,
        {"benchmark": "collectives", "ranks": options.ranks, **figures, "bars": held},
        as_json=options.json,
    )
    print(*(f"{'held' if ok else 'MISSED'}  {bar}" for bar, ok in held.items()), sep="\n", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
