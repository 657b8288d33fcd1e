"""What each partitioner gives and takes: `python -m benchmarks.partition --ranks 256 --batch 128 --lengths lognormal`.

Plans of synthetic global batches, on one core: lognormal lengths have median 3,500 and σ 0.9, Pareto ones are
(Pareto(1.1) + 1)·200, both clipped at 21,000 items; a sample costs 10·1024²·L + 2048·L². Imbalance is max/mean − 1 of
the ranks' costs, the busiest rank's bytes are in mean batches, and milliseconds are those of a warm partitioner: on the
clock, and on the processor alone, which other programs disturb less. Figures are medians over seeds.
"""

import argparse
import time
from importlib.util import find_spec
from typing import Any

import numpy as np

from benchmarks.report import Row, publish, row
from fs_data import RuntimeInfo, WorldBatch
from fs_data.cost import Quadratic
from fs_data.partition import Partitioner, PlanReport, identity, make, report
from fs_data.shuffle_plan import Features

VARIANTS: dict[str, Partitioner] = {
    "identity": identity,
    "fbs": make("fbs"),
    "vbs": make("vbs"),
    "lpt": make("lpt"),
    "few_moves": make("few_moves"),
    "few_moves_1pct": make("few_moves", tolerance=0.01),
}
UNITS = {
    "imbalance": "1", "bound": "1", "bytes_moved_share": "1", "busiest_rank_bytes": "mean batches", "peak_tokens": "1",
}  # fmt: skip


def draw_lengths(kind: str, size: int, seed: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    rng = np.random.default_rng(seed)
    drawn = rng.lognormal(np.log(3500), 0.9, size) if kind == "lognormal" else (rng.pareto(1.1, size) + 1) * 200
    return drawn.clip(1, 21_000).astype(np.int64)


def make_world(kind: str, ranks: int, batch: int, seed: int) -> WorldBatch:
    """A global batch as dealt, with 8 bytes an item and 64 beside."""
    lengths = draw_lengths(kind, ranks * batch, seed)
    zero = np.zeros_like(lengths)
    rank = np.repeat(np.arange(ranks), batch)
    features = Features(
        rank=rank, num_tokens=lengths, num_candidates=zero, content_sum=zero, content_sum_of_squares=zero,
        num_bytes=8 * lengths + 64,
    )  # fmt: skip
    return WorldBatch(
        world_size=ranks, rank=rank, cost=Quadratic()(features), num_tokens=lengths, num_bytes=features.num_bytes
    )


def measure(kind: str, ranks: int, batch: int, seeds: int) -> tuple[list[Row], dict[str, dict[str, float]]]:
    worlds = [make_world(kind, ranks, batch, seed) for seed in range(seeds)]
    for partition in VARIANTS.values():
        partition(worlds[0], RuntimeInfo())  # compiles
    reports: dict[str, list[PlanReport]] = {name: [] for name in VARIANTS}
    milliseconds: dict[str, dict[str, list[float]]] = {name: {"ms": [], "cpu_ms": []} for name in VARIANTS}
    for world in worlds:
        for name, partition in VARIANTS.items():
            start, cpu_start = time.perf_counter(), time.thread_time()
            destination = partition(world, RuntimeInfo())
            milliseconds[name]["ms"].append(1000 * (time.perf_counter() - start))
            milliseconds[name]["cpu_ms"].append(1000 * (time.thread_time() - cpu_start))
            reports[name].append(report(world, destination))
    where = f"{kind} {ranks}x{batch}"
    rows: list[Row] = []
    figures: dict[str, dict[str, float]] = {}
    for name in VARIANTS:
        of_metric = {m: [float(getattr(r, m)) for r in reports[name]] for m in UNITS} | milliseconds[name]
        rows += [row(name, where, m, UNITS.get(m, "ms"), values) for m, values in of_metric.items()]
        figures[name] = {m: float(np.median(values)) for m, values in of_metric.items()}
    return rows, figures


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[256])
    parser.add_argument("--batch", type=int, default=128, help="samples a rank")
    parser.add_argument("--lengths", choices=("lognormal", "pareto"), nargs="+", default=["lognormal", "pareto"])
    parser.add_argument("--seeds", type=int, default=9, help="global batches of each kind")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(arguments)
    rows: list[Row] = []
    figures: dict[str, Any] = {"batch": options.batch, "compiled": find_spec("numba") is not None}
    found: dict[str, Any] = {}
    for kind in options.lengths:
        for ranks in options.ranks:
            new, found[f"{kind} {ranks}x{options.batch}"] = measure(kind, ranks, options.batch, options.seeds)
            rows += new
    # One setting gives its partitioners at once; several are told apart by their names.
    figures |= next(iter(found.values())) if len(found) == 1 else found
    publish("partition", rows, figures, as_json=options.json)


if __name__ == "__main__":
    main()
