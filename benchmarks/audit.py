"""Whether the audit's promise is kept: `python -m benchmarks.audit --ranks 2 --json`.

Real ranks and loaders on an uneven dataset: heavy-tailed histories, those of the last rank twice as long. A step's
compute is a timed wait of c0 + c1·ΣL + c2·ΣL² for the samples that the rank holds, which leaves the host idle as a
GPU's does, times a pace of the rank's own in that step; the step ends with a barrier. First an audit runs over the data
as dealt, and predicts; then the same data are balanced by `few_moves`, with costs calibrated as the run goes, and the
steps' time on the clock is compared with the prediction.
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

from benchmarks.loader_overhead import HeavyTailed
from benchmarks.report import publish, row
from fs_data import BalancedDataLoader

SKIPPED = 20  # steps until caches are warm and costs are calibrated
C0_S, C1_S, C2_S = 10e-3, 4e-7, 2e-11  # about 100 ms for 32 samples, half of it attention


class Uneven(HeavyTailed):
    """The last rank's histories are twice as long."""

    def __init__(self, rank: int, ranks: int, batch: int, num_batches: int) -> None:
        super().__init__(rank, batch, num_batches)
        if rank == ranks - 1:
            self.pool = [self._batch(b["items"].lengths.numpy() * 2) for b in self.pool]


def compute(lengths: torch.Tensor, pace: float) -> float:
    """Waits for as long as a model would compute; returns the seconds it was meant to take."""
    work = lengths.double()
    seconds = pace * (C0_S + C1_S * float(work.sum()) + C2_S * float((work**2).sum()))
    end = time.perf_counter() + seconds
    time.sleep(seconds)
    return seconds + max(0.0, time.perf_counter() - end)


def steps(loader: BalancedDataLoader[Any], rng: np.random.Generator) -> Iterator[float]:
    """Seconds on the clock from barrier to barrier."""
    dist.barrier()
    start = time.perf_counter()
    for batch in loader:
        loader.record_compute(compute(batch["items"].lengths, rng.normal(1, 0.02)))
        dist.barrier()
        yield time.perf_counter() - start
        start = time.perf_counter()


def run_rank(rank: int, options: argparse.Namespace, queue: Any) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(options.port))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=options.ranks)
    rng = np.random.default_rng((rank, 1))
    source = Uneven(rank, options.ranks, options.batch, options.steps + SKIPPED)
    with BalancedDataLoader(source, audit=True, cost="calibrated", timeout_s=60) as loader:
        dealt = list(steps(loader, rng))
        report = loader.audit()
    with BalancedDataLoader(source, cost="calibrated", timeout_s=60) as loader:
        balanced = list(steps(loader, rng))
        imbalance = loader.stats().imbalance
    if rank == 0:
        queue.put((dealt[SKIPPED:], balanced[SKIPPED:], report, imbalance))
    dist.barrier()
    dist.destroy_process_group()


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--batch", type=int, default=32, help="samples a rank")
    parser.add_argument("--steps", type=int, default=60, help="measured steps of each pass")
    parser.add_argument("--port", type=int, default=29641)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(arguments)
    queue: Any = mp.get_context("spawn").SimpleQueue()
    mp.start_processes(run_rank, (options, queue), options.ranks, start_method="spawn")
    dealt, balanced, report, imbalance = queue.get()
    predicted, realised = report.balanced_step_ms, 1000 * float(np.mean(balanced))
    rows = [
        row("as dealt", options.ranks, "step, clock", "ms", [1000 * s for s in dealt]),
        row("as dealt", options.ranks, "step, compute of the slowest", "ms", report.step_ms),
        row("as dealt", options.ranks, "straggler share", "1", report.straggler_share),
        row("balanced", options.ranks, "step, predicted", "ms", predicted),
        row("balanced", options.ranks, "step, clock", "ms", [1000 * s for s in balanced]),
    ]
    figures = {
        "ranks": options.ranks,
        "dealt_step_ms": 1000 * float(np.mean(dealt)),
        "predicted_step_ms": predicted,
        "realised_step_ms": realised,
        "prediction_error": predicted / realised - 1,
        "straggler_share": report.straggler_share,
        "imbalance": imbalance,
    }
    publish("audit", rows, figures, as_json=options.json)


if __name__ == "__main__":
    main()
