"""How fast histories come out of parquet, beside bare pyarrow, HF datasets and a scanner; and in how much memory.

All variants read the same generated file, one after the other and in turns, in one process each time: values per
second, where a value is one item of a history or one scalar. The floor of `bare` is what pyarrow needs to decode the
row groups into Arrow memory; the dataset does that, and cuts batches of tensors.

HF datasets streams the same file twice: as its documentation has it, example by example into a DataLoader that joins
them, and in its own batches, its quickest way; both end in the same values and offsets.

Memory is what a process of its own needs at most while it iterates slowly: on the file, and on one that is several
times larger, with the same bound. `peak_mb` is what Arrow has handed out, which the bound is about; `resident_mb` the
anonymous memory that the process gains after a first batch has loaded all code, with what Arrow's allocator keeps.
"""

import argparse
import gc
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import torch
from torch import Tensor

from benchmarks.report import publish, row
from fs_data import JaggedColumn
from fs_data.generate import draw_lengths
from fs_data.parquet import ParquetUIHDataset
from fs_data.parquet.columns import Column

BATCH_SIZE = 128


def write(path: Path, num_mb: int, rows_per_group: int = 256) -> None:
    """Users, histories of the paper's lengths and labels, `num_mb` on disk: ids are drawn evenly, as hashes are."""
    schema = pa.schema([("user", pa.int64()), ("history", pa.list_(pa.int64())), ("label", pa.float32())])
    rng = np.random.default_rng(0)
    first = 0
    with pq.ParquetWriter(path, schema, use_dictionary=False) as writer:
        while not path.exists() or path.stat().st_size < num_mb << 20:
            lengths = draw_lengths(rng, rows_per_group, max_length=21_000)
            offsets = pa.array(np.concatenate(([0], np.cumsum(lengths))).astype(np.int32))
            ids = pa.array(rng.integers(0, 1 << 48, int(lengths.sum())))
            columns = [
                pa.array(np.arange(first, first + rows_per_group)),
                pa.ListArray.from_arrays(offsets, ids),
                pa.array(rng.random(rows_per_group, np.float32)),
            ]
            writer.write_table(pa.table(columns, schema=schema), row_group_size=rows_per_group)
            first += rows_per_group


def count(column: Column) -> int:
    return column.numel() if isinstance(column, torch.Tensor) else column.values.numel()


def by_dataset(path: Path, prefetch_bytes: int = 0) -> int:
    dataset = ParquetUIHDataset(path, batch_size=BATCH_SIZE, prefetch_bytes=prefetch_bytes)
    return sum(count(column) for batch in dataset for column in batch.values())


def by_dataset_ahead(path: Path) -> int:
    return by_dataset(path, 256 << 20)


def by_row_groups(path: Path) -> int:
    with pq.ParquetFile(path) as file:
        tables = (file.read_row_group(g, use_threads=False) for g in range(file.num_row_groups))
        return sum(t.num_rows * 2 + sum(len(c.values) for c in t["history"].chunks) for t in tables)


def by_scanner(path: Path) -> int:
    total = 0
    for batch in ds.dataset(path).scanner(batch_size=BATCH_SIZE, use_threads=False).to_batches():
        history = batch.column("history")
        values = torch.from_dlpack(history.flatten())
        total += values.numel() + 2 * torch.from_dlpack(batch.column("user")).numel()
    return total


def hugging_face(path: Path) -> Any:
    import datasets

    stream: Any = datasets.load_dataset("parquet", data_files=str(path), split="train", streaming=True)
    return stream.with_format("torch")


def jagged(users: Tensor, labels: Tensor, histories: list[Tensor]) -> int:
    column = JaggedColumn.from_lengths(torch.cat(histories), torch.tensor([len(h) for h in histories]))
    return users.numel() + labels.numel() + column.values.numel()


def by_hugging_face(path: Path) -> int:
    def collate(examples: list[dict[str, Tensor]]) -> int:
        users, labels = (torch.stack([e[name] for e in examples]) for name in ("user", "label"))
        return jagged(users, labels, [e["history"] for e in examples])

    return sum(torch.utils.data.DataLoader(hugging_face(path), batch_size=BATCH_SIZE, collate_fn=collate))


def by_hugging_face_batches(path: Path) -> int:
    batches = hugging_face(path).iter(batch_size=BATCH_SIZE)
    return sum(jagged(b["user"], b["label"], list(b["history"])) for b in batches)


VARIANTS: dict[str, Callable[[Path], int]] = {
    "dataset": by_dataset,
    "dataset, reading ahead": by_dataset_ahead,
    "bare row groups": by_row_groups,
    "scanner": by_scanner,
    "HF datasets": by_hugging_face,
    "HF datasets, in batches": by_hugging_face_batches,
}


def speeds(path: Path, repeats: int) -> dict[str, list[float]]:
    """Values a second of each variant, in turns."""
    found: dict[str, list[float]] = {name: [] for name in VARIANTS}
    for _ in range(repeats):
        for name, read in VARIANTS.items():
            gc.collect()
            start = time.perf_counter()
            values = read(path)
            found[name].append(values / (time.perf_counter() - start))
    return found


def peaks_mb(path: Path, bound_mb: int) -> tuple[float, float]:
    """`peak_mb` and `resident_mb`, of a fresh process."""
    script = (
        "import sys\nfrom pathlib import Path\nfrom benchmarks.parquet import iterate\n"
        f"print(*iterate(Path(sys.argv[1]), {bound_mb}))"
    )
    done = subprocess.run([sys.executable, "-c", script, str(path)], capture_output=True, text=True, check=True)
    peak, resident = map(float, done.stdout.split()[-2:])
    return peak, resident


def iterate(path: Path, bound_mb: int) -> tuple[float, float]:
    """Reads with a consumer that is slower than reading, so that memory fills up."""
    next(iter(ParquetUIHDataset(path, batch_size=BATCH_SIZE, prefetch_bytes=1)))  # loads all code
    dataset = ParquetUIHDataset(path, batch_size=BATCH_SIZE, prefetch_bytes=bound_mb << 20)
    before = most = _memory_mb("RssAnon")
    for batch in dataset:
        time.sleep(sum(map(count, batch.values())) / 20e6)
        most = max(most, _memory_mb("RssAnon"))
    return (pa.default_memory_pool().max_memory() or 0) / (1 << 20), most - before


def _memory_mb(key: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(key)) / 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="end with one JSON line")
    parser.add_argument("--mb", type=int, default=256, help="size of the file that is timed")
    parser.add_argument("--large-mb", type=int, default=1024, help="size of the file for memory")
    parser.add_argument("--bound-mb", type=int, default=256, help="prefetch_bytes of the memory measurement")
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        os.environ.setdefault("HF_HOME", folder)
        file, large = Path(folder) / "file.parquet", Path(folder) / "large.parquet"
        write(file, args.mb)
        found = speeds(file, args.repeats)
        write(large, args.large_mb)
        peaks = {path.stat().st_size >> 20: peaks_mb(path, args.bound_mb) for path in (file, large)}
    rows = [row(name, args.mb, "values_per_s", "1/s", samples) for name, samples in found.items()]
    for size, (peak, resident) in peaks.items():
        rows.append(row("dataset, reading ahead", size, "peak_mb", "MB", peak))
        rows.append(row("dataset, reading ahead", size, "resident_mb", "MB", resident))

    def ratio(name: str, to: str) -> float:
        return float(np.median([a / b for a, b in zip(found[name], found[to], strict=True)]))

    figures = {
        "values_per_s": {name: float(np.median(samples)) for name, samples in found.items()},
        "ratio_to_bare": ratio("dataset", "bare row groups"),
        "ratio_to_bare_ahead": ratio("dataset, reading ahead", "bare row groups"),
        "ratio_to_scanner": ratio("dataset", "scanner"),
        "ratio_to_hf": ratio("dataset", "HF datasets"),
        "ratio_to_hf_batches": ratio("dataset", "HF datasets, in batches"),
        "peak_mb": {size: peak for size, (peak, _) in peaks.items()},
        "resident_mb": {size: resident for size, (_, resident) in peaks.items()},
        "bound_mb": args.bound_mb,
    }
    publish("parquet", rows, figures, as_json=args.json)


if __name__ == "__main__":
    main()
