"""What balancing would save on a file of histories: `python -m benchmarks.balance DATA.parquet --ranks 64 --batch 32`.

A front of `fs-data balance`: the trial lives in `fs_data.trial`, and trains nothing. Without DATA, histories are drawn
as `fs-data generate` draws them. Also the paper's Figure 2: straggler percentage and sparsity by the longest history
that training permits, for the given ranks and for some more.
"""

import argparse
from dataclasses import asdict

import numpy as np

from benchmarks.report import Row, publish, row
from fs_data.generate import draw_lengths
from fs_data.trial import by_longest, cost_model, read_lengths, try_partitioners

_METRICS = ("straggler_share", "saved_share", "sparsity", "bound", "bytes_moved_share", "busiest_rank_bytes", "plan_ms")
_UNITS = {"busiest_rank_bytes": "mean batches", "plan_ms": "ms"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", nargs="?", help="parquet; drawn where it is left out")
    parser.add_argument("--column", default="history")
    parser.add_argument("--ranks", type=int, default=64)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--cost", default="quadratic", help="as for fs-data balance")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if options.data is None:
        lengths = draw_lengths(np.random.default_rng(0), 20 * options.ranks * options.batch, max_length=21_000)
    else:
        lengths = read_lengths(options.data, options.column)
    cost = cost_model(options.cost)
    trials = try_partitioners(
        lengths, ranks=options.ranks, batch_size=options.batch, cost=cost, most_steps=options.steps
    )
    rows: list[Row] = []
    x = f"{options.ranks}x{options.batch}"
    for trial in trials:
        rows += [row(trial.partitioner, x, m, _UNITS.get(m, "1"), getattr(trial, m)) for m in _METRICS]
    curves: dict[str, list[dict[str, float]]] = {}
    for ranks, batch in dict.fromkeys([(options.ranks, options.batch), (8, options.batch), (options.ranks, 128)]):
        points = by_longest(lengths, ranks=ranks, batch_size=batch, cost=cost, most_steps=options.steps)
        curves[f"{ranks}x{batch}"] = [asdict(p) for p in points]
        for p in points:
            variant = f"as dealt {ranks}x{batch}"
            rows.append(row(variant, p.max_uih, "straggler_share", "1", p.straggler_share))
            rows.append(row(variant, p.max_uih, "sparsity", "1", p.sparsity))
    figures = {"trials": {t.partitioner: asdict(t) for t in trials}, "by_longest": curves}
    publish("balance", rows, figures, as_json=options.json)


if __name__ == "__main__":
    main()
