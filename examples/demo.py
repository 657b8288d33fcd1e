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
LIMIT_S = 600.0
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
    "steps": ("steps", "{:.0f}"),
    "loss": ("loss", "{:.4f}"),
    "normalized entropy": ("normalized_entropy", "{:.4f}"),
    "straggler": ("straggler", "{:.1%}"),
    "exposed communication (table), ms a step": ("exposed_ms_per_step", "{:.2f}"),
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
    for name in ("ranks", "users", "steps"):
        if getattr(options, name) < 1:
            parser.error(f"--{name} must be at least 1, got {getattr(options, name)}")

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
        places = {"data": data, "out": out, "report": report}
        # An epoch takes one step at least, so that all steps are taken however few users there are.
        flags = SETTINGS | variant | places | {"max-steps": options.steps, "epochs": options.steps}
        if status := train(options.ranks, flags):
            console.print(f"[red]the run '{name}' failed: {status}")
            return 1
        found[name] = json.loads(report.read_text())
    console.print(side_by_side(found, f"{options.users} users, {options.ranks} ranks"))
    return 0


def train(num_ranks: int, flags: Mapping[str, object]) -> str:
    """Runs `examples.train` under torchrun; what went wrong, or nothing."""
    launcher = (sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_ranks}")
    command = [*launcher, "-m", "examples.train", *(f"--{name}={value}" for name, value in flags.items())]
    with subprocess.Popen(command) as torchrun:
        try:
            status = torchrun.wait(LIMIT_S)
        except BaseException as error:  # Ctrl-C too
            torchrun.terminate()  # not kill: it ends its ranks, which would go on without it
            torchrun.wait()
            if isinstance(error, subprocess.TimeoutExpired):
                return f"it took longer than {LIMIT_S} s"
            raise
    return f"exit status {status}" if status else ""


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
