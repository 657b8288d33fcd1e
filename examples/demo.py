"""`make demo`: the same model on the same histories, twice, on two ranks; what FreeScale changes stands side by side.

First with the plain loader and synchronous embeddings, then with the balanced loader and prioritized embeddings.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from rich.console import Console
from rich.table import Table

from fs_data.generate import write_histories

NUM_ITEMS, MAX_LENGTH = 20_000, 1_000
SETTINGS = {
    "num-items": NUM_ITEMS,
    "max-length": MAX_LENGTH,
    "dim": 32,
    "dropout": 0.1,
    "batch-size": 16,
    "log-every": 20,
}
VARIANTS = {
    "plain, synchronous": {"loader": "plain", "embeddings": "synchronous"},
    "balanced, prioritized": {"loader": "balanced", "embeddings": "prioritized"},
}
ROWS = {
    "loss": ("loss", "{:.4f}"),
    "normalized entropy": ("normalized_entropy", "{:.4f}"),
    "straggler": ("straggler", "{:.1%}"),
    "exposed communication, ms a step": ("exposed_ms_per_step", "{:.2f}"),
    "samples/s": ("samples_per_s", "{:.0f}"),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--folder", type=Path, default=Path("demo-data"), help="for the generated histories and the runs"
    )
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--users", type=int, default=4_000)
    parser.add_argument("--steps", type=int, default=100)
    options = parser.parse_args()

    data = options.folder / "histories.parquet"
    options.folder.mkdir(parents=True, exist_ok=True)
    console = Console()
    console.print(f"generating {options.users} histories in {data}")
    write_histories(data, num_users=options.users, num_items=NUM_ITEMS, max_length=MAX_LENGTH, seed=0)

    found: dict[str, dict[str, float]] = {}
    for name, variant in VARIANTS.items():
        console.rule(name)
        out = options.folder / variant["loader"]
        report = out.with_suffix(".json")
        flags = SETTINGS | variant | {"data": data, "max-steps": options.steps, "out": out, "report": report}
        if status := train(options.ranks, flags):
            console.print(f"[red]the run '{name}' failed with exit status {status}")
            return 1
        found[name] = json.loads(report.read_text())
    console.print(side_by_side(found, f"{options.steps} steps on {options.ranks} ranks"))
    return 0


def train(num_ranks: int, flags: Mapping[str, object]) -> int:
    """Runs `examples.train` under torchrun; its exit status."""
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_ranks}")
    command = [*torchrun, "-m", "examples.train", *(f"--{name}={value}" for name, value in flags.items())]
    return subprocess.run(command, check=False, timeout=600).returncode


def side_by_side(found: Mapping[str, Mapping[str, float]], title: str) -> Table:
    """A column a variant, a row a figure."""
    table = Table(title=title)
    table.add_column("", no_wrap=True)
    for name in found:
        table.add_column(name, justify="right")
    for row, (key, form) in ROWS.items():
        table.add_row(row, *(form.format(figures[key]) for figures in found.values()))
    return table


if __name__ == "__main__":
    sys.exit(main())
