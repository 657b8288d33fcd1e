"""`make demo`: the same model on the same histories, twice, on two ranks; what FreeScale changes stands side by side.

First with the plain loader and synchronous embeddings, then with the balanced loader and prioritized embeddings.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path

from rich.console import Console
from rich.table import Table

from fs_data.generate import write_histories

NUM_ITEMS = 20_000
VARIANTS = {
    "plain, synchronous": ("--loader", "plain", "--embeddings", "synchronous"),
    "balanced, prioritized": ("--loader", "balanced", "--embeddings", "prioritized"),
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
    write_histories(data, num_users=options.users, num_items=NUM_ITEMS, max_length=1_000, seed=0)

    found: dict[str, dict[str, float]] = {}
    for name, flags in VARIANTS.items():
        console.rule(name)
        report = options.folder / f"{flags[1]}.json"
        command = [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={options.ranks}"),
            *("-m", "examples.train", "--data", str(data), "--num-items", str(NUM_ITEMS), "--max-length", "1000"),
            *(
                "--dim",
                "32",
                "--dropout",
                "0.1",
                "--batch-size",
                "16",
                "--epochs",
                "1",
                "--max-steps",
                str(options.steps),
            ),
            *("--out", str(options.folder / flags[1]), "--report", str(report), "--log-every", "20", *flags),
        ]
        status = subprocess.run(command, check=False, timeout=600).returncode
        if status:
            console.print(f"[red]the run '{name}' failed with exit status {status}")
            return 1
        found[name] = json.loads(report.read_text())

    table = Table(title=f"{options.steps} steps on {options.ranks} ranks")
    for column in ("", *found):
        table.add_column(column, justify="right" if column else "left")
    for title, (key, form) in ROWS.items():
        table.add_row(title, *(form.format(figures[key]) for figures in found.values()))
    console.print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
