"""What the balanced loader costs a training step: `python -m benchmarks.loader_overhead --ranks 2 --json`.

Each rank draws heavy-tailed batches and computes for about 100 ms a step, which ends with a barrier as a step with
gradient averaging does. The compute is a timed wait that leaves the host idle, as a GPU's does; with `--busy` it is
matrix products that keep one core busy. The same number of milliseconds is spent whichever samples a rank holds, so the
share is the loader's cost alone, without what balancing saves. Plain and balanced steps alternate in blocks within one
run, and medians are compared: a share is their ratio minus one.

Then an audit of an uneven dataset, whose ranks compute for as long as their samples' lengths say: it predicts the step
time with balancing, which is then switched on and measured (`audit_error_share`).
"""

import argparse
import os
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from benchmarks.report import publish, row
from fs_data import BalancedDataLoader, JaggedColumn

VARIANTS = ("plain", "few_moves", "fbs")
WARM_UP = 5


class HeavyTailed:
    """Batches of histories, lengths lognormal of median 3,500 and σ 0.9 clipped at 21,000, and three more leaves."""

    def __init__(self, rank: int, batch_size: int, num_batches: int, *, skew: float = 1.0) -> None:
        """`skew`: how many times longer the histories of the last rank are than those of rank 0, in the median."""
        rng = np.random.default_rng(rank)
        median = 3500 * skew ** (rank / max(dist.get_world_size() - 1, 1))
        lengths = np.exp(rng.normal(np.log(median), 0.9, (8, batch_size))).clip(1, 21_000).astype(np.int64)
        self.pool = [self._batch(x) for x in lengths]
        self.num_batches = num_batches

    @staticmethod
    def _batch(lengths: np.ndarray[Any, np.dtype[np.int64]]) -> dict[str, Any]:
        n, total = torch.from_numpy(lengths), int(lengths.sum())
        return {
            "user": torch.arange(len(n)),
            "items": JaggedColumn.from_lengths(torch.randint(0, 1 << 40, (total,)), n),
            "actions": JaggedColumn.from_lengths(torch.randint(0, 8, (total,), dtype=torch.uint8), n),
            "label": torch.rand(len(n), 4),
        }

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for i in range(self.num_batches):
            yield {k: v for k, v in self.pool[i % len(self.pool)].items()} | {
                "user": torch.arange(len(self.pool[0]["user"]))
            }


def compute(seconds: float, busy: bool, matrix: torch.Tensor) -> None:
    if not busy:
        time.sleep(seconds)
        return
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        matrix @ matrix


def audit_then_balance(rank: int, options: argparse.Namespace) -> tuple[float, float, float]:
    """Milliseconds of a step as dealt, predicted with balancing, and measured with balancing."""

    def step_ms(**choice: Any) -> tuple[float, BalancedDataLoader[Any]]:
        source = HeavyTailed(rank, options.batch, options.steps + WARM_UP, skew=1.5)
        slowest: list[float] = []
        loader = BalancedDataLoader(source, timeout_s=60, **choice)
        for batch in loader:
            n = batch["items"].lengths.double()
            start = time.perf_counter()
            time.sleep(0.01 + options.compute_ms / 1000 * float((n / 6e5 + n * n / 6e9).sum()))
            seconds = torch.tensor(time.perf_counter() - start)
            loader.record_compute(float(seconds))
            dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
            slowest.append(float(seconds))
        return 1000 * float(np.mean(slowest[WARM_UP:])), loader

    dealt, loader = step_ms(audit=True)
    predicted = loader.audit().balanced_step_ms
    loader.close()
    balanced, loader = step_ms()
    loader.close()
    return dealt, predicted, balanced


def run_rank(rank: int, options: argparse.Namespace, port: int, queue: Any) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=options.ranks)
    matrix = torch.rand(256, 256)
    passes: dict[str, Iterator[Any]] = {}
    loaders: dict[str, BalancedDataLoader[Any]] = {}
    steps_in_all = WARM_UP + options.steps
    for variant in VARIANTS:
        source = HeavyTailed(rank, options.batch, steps_in_all + 3)
        if variant != "plain":
            loaders[variant] = BalancedDataLoader(source, partitioner=variant, timeout_s=60)
        passes[variant] = iter(loaders.get(variant, source))
    seconds: dict[str, list[float]] = {v: [] for v in VARIANTS}
    waits: dict[str, list[float]] = {v: [] for v in VARIANTS}
    # Blocks long enough that a loader works ahead within its own steps, not during another variant's.
    done = 0
    while done < steps_in_all:
        block = WARM_UP if not done else min(options.block, steps_in_all - done)
        for variant in VARIANTS:
            for i in range(block):
                start = time.perf_counter()
                batch = next(passes[variant])
                waited = time.perf_counter() - start
                compute(options.compute_ms / 1000, options.busy, matrix)
                del batch
                dist.barrier()
                if done and i:  # the first of a block found its batches ready since the last block
                    seconds[variant].append(time.perf_counter() - start)
                    waits[variant].append(waited)
        done += block
    stats = {v: loader.stats() for v, loader in loaders.items()}
    for loader in loaders.values():
        loader.close()
    audited = None if options.busy else audit_then_balance(rank, options)
    if rank == 0:
        shown = {v: (s.imbalance_before, s.imbalance, s.stage_ms) for v, s in stats.items()}
        queue.put((seconds, waits, shown, audited))
    dist.barrier()
    dist.destroy_process_group()


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--batch", type=int, default=128, help="samples a rank")
    parser.add_argument("--steps", type=int, default=120, help="measured steps of each variant")
    parser.add_argument("--block", type=int, default=20, help="steps of one variant in a row")
    parser.add_argument("--compute-ms", type=float, default=100.0)
    parser.add_argument("--port", type=int, default=29631)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(arguments)
    context = mp.get_context("spawn")
    rows, figures = [], {"ranks": options.ranks}
    for options.busy in (False, True):
        queue: Any = context.SimpleQueue()
        mp.start_processes(run_rank, (options, options.port + options.busy, queue), options.ranks, start_method="spawn")
        seconds, waits, stats, audited = queue.get()
        host = "busy" if options.busy else "idle"
        plain = float(np.median(seconds["plain"]))
        for variant in VARIANTS:
            rows.append(row(variant, host, "step", "ms", [1000 * s for s in seconds[variant]]))
            rows.append(row(variant, host, "exposed wait", "ms", [1000 * s for s in waits[variant]]))
            if variant == "plain":
                continue
            share, wait = float(np.median(seconds[variant])) / plain - 1, 1000 * float(np.median(waits[variant]))
            before, after, stages = stats[variant]
            rows.append(row(variant, host, "overhead share", "1", share))
            rows += [row(variant, host, stage, "ms", ms) for stage, ms in stages.items()]
            rows += [row(variant, host, "imbalance before", "1", before), row(variant, host, "imbalance", "1", after)]
            suffix = "_busy_host" if options.busy else ""
            figures |= {f"overhead_share{suffix}_{variant}": share, f"exposed_wait_ms{suffix}_{variant}": wait}
        if audited is not None:
            names = ("as dealt", "predicted by the audit", "balanced")
            rows += [row("audit", name, "step", "ms", ms) for name, ms in zip(names, audited, strict=True)]
            dealt, predicted, balanced = audited
            figures |= {"audit_error_share": predicted / balanced - 1, "audit_saved_share": 1 - balanced / dealt}
        worst = max(figures[k] for k in figures if k.startswith("overhead_share") and ("busy" in k) == options.busy)
        figures["overhead_share_busy_host" if options.busy else "overhead_share"] = worst
    figures["exposed_wait_ms"] = max(figures[f"exposed_wait_ms_{v}"] for v in VARIANTS[1:])
    publish("loader_overhead", rows, figures, as_json=options.json)


if __name__ == "__main__":
    main()
