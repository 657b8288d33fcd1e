"""Jagged operations on a GPU: bytes a second against a plain copy, and the paper's Figure 7.

Run where there is a CUDA device: `python -m benchmarks.kernels --json`. The floor of every operation is its bytes, each
read once and written once, at the rate of a device copy that is timed in the same run.
"""

import argparse
from collections.abc import Callable

import torch
from triton.testing import do_bench

import fs_kernels
from benchmarks.report import Row, publish, row

FEATURES = 8
BYTES_A_RANK = 1 << 20  # Figure 7 fixes the bytes of a rank: more ranks are more and shorter segments of the whole


def milliseconds(run: Callable[[], object]) -> list[float]:
    """p20, median and p80 of many runs, by device events."""
    return do_bench(run, warmup=50, rep=200, quantiles=[0.2, 0.5, 0.8])


def lengths_of(num_rows: int, mean: float) -> torch.Tensor:
    """`(num_rows,)` heavy-tailed lengths of about this mean."""
    torch.manual_seed(0)
    drawn = torch.distributions.LogNormal(0.0, 0.9).sample((num_rows,))
    return (drawn * (mean / drawn.mean())).long().clamp(min=1)


def permute_case(num_rows: int, mean: float, inner: tuple[int, ...], dtype: torch.dtype) -> dict[str, torch.Tensor]:
    lengths = lengths_of(num_rows, mean)
    offsets = torch.zeros(num_rows + 1, dtype=torch.int64)
    torch.cumsum(lengths, 0, out=offsets[1:])
    values = torch.randn(int(offsets[-1]), *inner).to(dtype)
    return {"values": values.cuda(), "offsets": offsets.cuda(), "index": torch.randperm(num_rows).cuda()}


def eager_loop(values: torch.Tensor, offsets: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """One slice a segment, as a straightforward implementation has it."""
    bounds = offsets.tolist()
    return torch.cat([values[bounds[i] : bounds[i + 1]] for i in index.tolist()])


def bandwidth(rows: list[Row]) -> dict[str, float]:
    """Shares of the copy's rate by size, for 8-byte ids and for rows of 512 bytes."""
    shares: dict[str, float] = {}
    for megabytes in (4, 64, 256, 1024):
        for what, inner, dtype in (("ids", (), torch.int64), ("rows of 512 bytes", (128,), torch.float32)):
            width = dtype.itemsize * (inner[0] if inner else 1)
            num_values = (megabytes << 20) // width
            case = permute_case(max(num_values // 300, 1), 300, inner, dtype)
            size = case["values"].numel() * dtype.itemsize
            n = len(case["values"])
            out = torch.empty_like(case["values"])
            copy = milliseconds(lambda out=out, case=case: out.copy_(case["values"]))
            ours = milliseconds(lambda case=case, n=n: fs_kernels.jagged_permute(**case, out_size=n, impl="triton"))
            reference = milliseconds(
                lambda case=case, n=n: fs_kernels.jagged_permute(**case, out_size=n, impl="reference")
            )
            for variant, ms in (("copy", copy), ("triton", ours), ("vectorised torch", reference)):
                rate = [2 * size / 1e6 / t for t in ms]
                rows.append(row(f"jagged_permute, {what}, {variant}", megabytes, "rate", "GB/s", rate))
            shares[f"{what}, {megabytes} MiB"] = round(copy[1] / ours[1], 3)
            shares[f"{what}, {megabytes} MiB, over torch"] = round(reference[1] / ours[1], 3)
    return shares


def figure_7(rows: list[Row]) -> dict[str, float]:
    """Speed over a loop of slices, and over vectorised torch, by the number of ranks."""
    found: dict[str, float] = {}
    for ranks in (8, 32, 128, 512):
        num_segments = ranks * FEATURES
        mean = BYTES_A_RANK * 8 / 8 / num_segments
        case = permute_case(num_segments, max(mean, 1.0), (), torch.int64)
        n = len(case["values"])
        loop = milliseconds(lambda case=case: eager_loop(**case))
        ours = milliseconds(lambda case=case, n=n: fs_kernels.jagged_permute(**case, out_size=n, impl="triton"))
        reference = milliseconds(lambda case=case, n=n: fs_kernels.jagged_permute(**case, out_size=n, impl="reference"))
        for variant, ms in (("loop of slices", loop), ("triton", ours), ("vectorised torch", reference)):
            rows.append(row(f"figure 7, {variant}", ranks, "time", "ms", ms))
        found[str(ranks)] = round(loop[1] / ours[1], 1)
        found[f"{ranks}, over torch"] = round(reference[1] / ours[1], 2)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="end with one JSON line")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("benchmarks.kernels needs a CUDA device: torch.cuda.is_available() is False")
    rows: list[Row] = []
    shares, figure = bandwidth(rows), figure_7(rows)
    publish("kernels", rows, {"share_of_copy": shares, "figure_7_speedup": figure}, as_json=options.json)


if __name__ == "__main__":
    main()
