"""Jagged operations on a GPU: bytes a second against a plain copy, small inputs, and the paper's Figure 7.

Run where there is a CUDA device: `python -m benchmarks.kernels --json`. The floor of every operation is the bytes that
it must read and write, at the rate of a device copy that is timed in the same run.
"""

import argparse
from collections.abc import Iterator

import torch
from torch import Tensor

from benchmarks import kernel_case
from benchmarks.kernel_case import SIZES, Case, copy_of, device_ms, graph_us, wall_us
from benchmarks.kernel_cases_copies import KEYS, Batch, copy_cases, dispatch_case
from benchmarks.kernel_cases_rows import row_cases
from benchmarks.report import Row, publish, row

RANKS = (8, 32, 128, 512)
BYTES_A_RANK = 1 << 16  # Figure 7 fixes the bytes of a rank: more ranks are more segments of the same length
SMALL = {"80 kB": 80_000, "4 MiB": 4 << 20}  # 10⁴ ids, and what a rank's batch may have

Figures = dict[str, dict[str, float]]


def all_cases(num_bytes: int) -> Iterator[Case]:
    """Those that move so many bytes, counted once; one after the other, since each takes a few times the memory."""
    yield from copy_cases(num_bytes)
    yield from row_cases(num_bytes)


def bandwidth(rows: list[Row]) -> Figures:
    """By kernel and size, the share of the copy's rate, and how many times that of torch and of FBGEMM."""
    found: Figures = {}
    for megabytes in SIZES:
        for case in all_cases(megabytes << 20):
            check(case)
            copy = device_ms(copy_of(case.num_bytes))
            ours, reference = device_ms(case.ours), device_ms(case.torch)
            times = {"copy": copy, "fs_kernels": ours, "torch": reference}
            shares = {"of copy": copy[1] / ours[1], "over torch": reference[1] / ours[1]}
            if case.fbgemm is not None:
                times["fbgemm"] = device_ms(case.fbgemm)
                shares["over fbgemm"] = times["fbgemm"][1] / ours[1]
            for who, ms in times.items():
                rate = [case.num_bytes / 1e6 / t for t in ms]
                rows.append(row(f"{case.kernel}, {who}", megabytes, "rate", "GB/s", rate))
            found[f"{case.kernel}, {megabytes} MiB"] = {k: round(v, 3) for k, v in shares.items()}
            print(f"{case.kernel}, {megabytes} MiB: {found[f'{case.kernel}, {megabytes} MiB']}", flush=True)
    return found


def small_inputs(rows: list[Row]) -> Figures:
    """By kernel and size, microseconds a call."""
    found: Figures = {}
    for size, num_bytes in SMALL.items():
        for case in all_cases(num_bytes):
            check(case)
            times = {"fs_kernels": wall_us(case.ours), "torch": wall_us(case.torch)}
            if case.fbgemm is not None:
                times["fbgemm"] = wall_us(case.fbgemm)
            for who, us in times.items():
                rows.append(row(f"{case.kernel}, {who}", size, "time of a call", "us", us))
            found[f"{case.kernel}, {size}"] = {who: round(us[1], 1) for who, us in times.items()}
            print(f"{case.kernel}, {size}: {found[f'{case.kernel}, {size}']}", flush=True)
    return found


def figure_7(rows: list[Row]) -> Figures:
    """By the number of ranks: microseconds a dispatch, and the speed over loops of slices."""
    found: Figures = {}
    for ranks in RANKS:
        lengths = torch.full((ranks * KEYS,), BYTES_A_RANK // 8 // KEYS)
        offsets = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
        batch = Batch(torch.arange(int(offsets[-1]), device="cuda"), offsets.cuda(), lengths, "8-byte ids")
        bounds = torch.arange(ranks + 1)
        case = dispatch_case(batch, bounds.cuda(), None)
        segments = [(k * ranks + r, k * ranks + r + 1) for r in range(ranks) for k in range(KEYS)]
        host = [(int(offsets[a]), int(offsets[b])) for a, b in segments]
        check_same(case.torch(), loop_over(batch.values, host))
        times = {
            "loop of slices, offsets on the device": wall_us(lambda b=batch, s=segments: loop_reading(b, s)),
            "loop of slices, offsets on the host": wall_us(lambda b=batch, h=host: loop_over(b.values, h)),
            "torch": wall_us(case.torch),
            "fs_kernels": wall_us(case.ours),
            "fs_kernels, in a CUDA graph": [graph_us(case.ours)] * 3,
        }
        if case.fbgemm is not None:
            times["fbgemm"] = wall_us(case.fbgemm)
        for who, us in times.items():
            rows.append(row(f"figure 7, {who}", ranks, "time of a call", "us", us))
        found[str(ranks)] = {who: round(us[1], 1) for who, us in times.items()}
        print(f"figure 7, {ranks} ranks: {found[str(ranks)]}", flush=True)
    return found


def loop_over(values: Tensor, segments: list[tuple[int, int]]) -> Tensor:
    return torch.cat([values[a:b] for a, b in segments])


def loop_reading(batch: Batch, segments: list[tuple[int, int]]) -> Tensor:
    """As a straightforward implementation has it: each slice waits for its offsets."""
    return torch.cat([batch.values[batch.offsets[a] : batch.offsets[b]] for a, b in segments])


def check(case: Case) -> None:
    """What is compared must compute the same; gaps between sections are ours alone."""
    if not case.kernel.startswith("ranged_dispatch"):
        ours = case.ours()
        for other in (case.torch, case.fbgemm):
            if other is not None and ours is not None:
                check_same(ours, other())


def check_same(one: object, other: object) -> None:
    first, second = (x if isinstance(x, Tensor) else x[0] for x in (one, other))  # pyright: ignore[reportIndexIssue]
    torch.testing.assert_close(first, second, rtol=1e-4, atol=1e-4)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="end with one JSON line")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("benchmarks.kernels needs a CUDA device: torch.cuda.is_available() is False")
    rows: list[Row] = []
    figures = {
        "fbgemm": kernel_case.fbgemm() is not None,
        "figure_7_us": figure_7(rows),
        "small_us": small_inputs(rows),
        "large": bandwidth(rows),
    }
    publish("kernels", rows, figures, as_json=options.json)


if __name__ == "__main__":
    main()
