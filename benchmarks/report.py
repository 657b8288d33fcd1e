"""What benchmarks print and keep: rows of percentiles, a table, a CSV file, and one JSON line at the end."""

import csv
import json
import platform
import subprocess
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

RESULTS = Path(__file__).parent / "results"


@dataclass(frozen=True, kw_only=True)
class Row:
    """One measured figure; the order of fields is that of the CSV's columns."""

    variant: str
    x: float | str
    """What the figure is drawn over."""
    metric: str
    unit: str
    p20: float
    p50: float
    p80: float
    device: str
    torch: str
    commit: str


def row(variant: str, x: float | str, metric: str, unit: str, samples: Sequence[float] | float) -> Row:
    """A row of the percentiles of `samples`, or of one exact figure."""
    p20, p50, p80 = np.percentile(np.atleast_1d(np.asarray(samples, np.float64)), (20, 50, 80)).tolist()
    return Row(
        variant=variant, x=x, metric=metric, unit=unit, p20=p20, p50=p50, p80=p80,
        device=_device(), torch=torch.__version__, commit=_commit(),
    )  # fmt: skip


def publish(name: str, rows: Sequence[Row], figures: dict[str, Any], *, as_json: bool) -> None:
    """Prints the table, writes `benchmarks/results/<name>.csv`, and ends with `figures` as one JSON line if asked."""
    print(table(rows))
    RESULTS.mkdir(exist_ok=True)
    with open(RESULTS / f"{name}.csv", "w", newline="") as file:
        writer = csv.DictWriter(file, [f.name for f in fields(Row)])
        writer.writeheader()
        writer.writerows(asdict(r) for r in rows)
    if as_json:
        print(json.dumps({"benchmark": name} | figures))


def table(rows: Sequence[Row]) -> str:
    head = ("variant", "x", "metric", "p20", "p50", "p80", "unit")
    lines = [head] + [
        (r.variant, str(r.x), r.metric, f"{r.p20:.4g}", f"{r.p50:.4g}", f"{r.p80:.4g}", r.unit) for r in rows
    ]
    widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
    return "\n".join("  ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True)).rstrip() for line in lines)


@cache
def _device() -> str:
    return torch.cuda.get_device_name() if torch.cuda.is_available() else f"{platform.machine()} CPU"


@cache
def _commit() -> str:
    command = ("git", "-C", str(RESULTS.parent), "rev-parse", "--short", "HEAD")
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"
