"""A trial of balancing on users' own histories, without training: what stragglers cost, and what each plan would save.

Global batches are cut from the lengths of histories as a loader would deal them, a cost model says how long each rank
computes, and a step lasts as long as its slowest rank.

Legend: N samples, R ranks, B samples a rank and step.
"""

import csv
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from fs_data.cost import CostModel, Linear, Moments, Power, Quadratic, quantise
from fs_data.jagged import JaggedColumn, NestedColumn
from fs_data.parquet import ParquetUIHDataset
from fs_data.parquet.columns import Column
from fs_data.partition import NAMES, PlanReport, identity, make, report
from fs_data.partition.report import sum_by_rank
from fs_data.plan import Assignment, RuntimeInfo, WorldBatch
from fs_data.shuffle_plan import Features

Ints = NDArray[np.int64]

PARTITIONERS = ("identity", *(name for name in NAMES if name != "identity"))
LIMITS = (1_000, 2_000, 4_000, 8_000, 12_000, 16_000, 21_000)
"""Longest histories of the paper's Figure 2."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Trial:
    """One partitioner over all steps. Shares are of 1: 0.01 is 1 %."""

    partitioner: str
    straggler_share: float
    """How much of a step a rank waits for the slowest one, in the mean over ranks."""
    saved_share: float
    """Of the computing time of all steps as dealt."""
    sparsity: float
    """Equation 1 of the paper for a rank's batch, in the mean: what padding to the longest history would waste."""
    imbalance: float
    """Costs of ranks, max/mean − 1, in the mean over steps."""
    bound: float
    """What no plan can beat: the dearest sample of a step over a rank's mean, minus 1."""
    bytes_moved_share: float
    busiest_rank_bytes: float
    """The most that one rank sends or receives, in mean batches."""
    plan_ms: float
    """Median time to plan a step on this machine."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Point:
    """As dealt, with histories cut to their newest `max_uih` items: a point of Figure 2."""

    max_uih: int
    straggler_share: float
    sparsity: float


def read_lengths(source: str, column: str = "history", seen: Callable[[int], None] = lambda rows: None) -> Ints:
    """`(N,)`: items of each row of a column of lists, or the numbers of a column of integers, which are lengths then.

    Raises:
        ParquetError: No such column, or a broken file.
        ValueError: A column of another kind, or a negative length.
    """
    lengths: list[Ints] = []
    for values in column_of(source, column, batch_size=4096):
        if isinstance(values, NestedColumn):
            some = values.outer_offsets.diff()
        elif isinstance(values, JaggedColumn):
            some = values.lengths
        elif values.dim() == 1 and not values.is_floating_point() and values.dtype != torch.bool:
            some = values
        else:
            fixed = f" in lists of fixed size {values.shape[1]}" if values.dim() == 2 else ""
            raise ValueError(f"{column!r} must hold lists, or integers that are lengths; got {values.dtype}{fixed}")
        lengths.append(some.numpy().astype(np.int64))
        seen(len(some))
    found = np.concatenate(lengths) if lengths else np.zeros(0, np.int64)
    if found.min(initial=0) < 0:
        raise ValueError(f"lengths in {column!r} must be at least 0, got {found.min()}")
    return found


def column_of(source: str, column: str, *, batch_size: int) -> Iterator[Column]:
    """Batches of one column.

    Raises:
        ParquetError: No such column, or a broken file.
        ValueError: A column of structs.
    """
    dataset = ParquetUIHDataset(source, columns=[column], batch_size=batch_size, rank=0, world_size=1)
    if fields := sorted({out for f in dataset.footers for out in f.outputs} - {column}):
        raise ValueError(f"{column!r} must hold lists, it holds structs: choose one of {fields}")
    for batch in dataset:
        yield batch[column]


def cost_model(text: str) -> CostModel:
    """From `linear`, `power:ALPHA`, `quadratic` or `quadratic:PER_ITEM,PER_ITEM_SQUARED`; or a CSV of measured times.

    Raises:
        ValueError: None of these.
    """
    name, _, settings = text.partition(":")
    try:
        if name == "linear" and not settings:
            return Linear()
        if name == "power":
            return Power(float(settings)) if settings else Power()
        if name == "quadratic":
            if not settings:
                return Quadratic()
            per_item, per_item_squared = map(int, settings.split(","))
            return Quadratic(per_item, per_item_squared)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{text!r} is no cost model: {error}") from error
    if Path(text).is_file():
        return measured_cost(Path(text))
    raise ValueError(
        "cost must be linear, power:ALPHA, quadratic, quadratic:PER_ITEM,PER_ITEM_SQUARED, or a CSV file of times with "
        f"the columns length and ms, got {text!r}"
    )


def measured_cost(path: Path) -> Quadratic:
    """Fits c1·ΣL + c2·ΣL² to times of batches whose histories all have one length.

    Args:
        path: CSV with the columns `length`, `ms` and, where batches had more than one history, `samples`.

    Raises:
        ValueError: Missing columns, no number where one must be, or times that do not grow with length.
    """
    moments = Moments()
    with open(path, newline="", encoding="utf-8-sig") as file:  # spreadsheets begin with a mark
        reader = csv.DictReader(file)
        try:
            names = reader.fieldnames = [name.strip() for name in reader.fieldnames or ()]
            lines = [(reader.line_num, line) for line in reader]
        except (UnicodeDecodeError, csv.Error) as error:
            raise ValueError(f"{path} must be a CSV file: {error}") from error
        if missing := {"length", "ms"} - set(names):
            raise ValueError(f"{path} must have the columns length and ms, it lacks {sorted(missing)} of {names}")
        for number, line in lines:
            try:
                length, samples, ms = float(line["length"]), float(line.get("samples") or 1), float(line["ms"])
            except (TypeError, ValueError) as error:
                raise ValueError(f"{path}, line {number}: length, ms and samples must be numbers: {error}") from error
            if not (0 <= length < np.inf and 0 < samples < np.inf and 0 <= ms < np.inf):
                raise ValueError(f"{path}, line {number}: length, ms and samples must be finite and not negative")
            moments.add(np.array([[1, samples * length, samples * length**2]]), np.array([1e6 * ms]))
    _, per_item, per_item_squared = quantise(moments.fit())
    if not per_item and not per_item_squared:
        raise ValueError(f"{path}: times must grow with length for balancing by length to help; these do not")
    return Quadratic(per_item, per_item_squared)


def try_partitioners(
    lengths: Ints,
    *,
    ranks: int,
    batch_size: int,
    cost: CostModel | None = None,
    partitioners: Sequence[str] = PARTITIONERS,
    most_steps: int = 100,
    bytes_per_item: int = 8,
    seed: int | None = 0,
    step_done: Callable[[], None] = lambda: None,
) -> list[Trial]:
    """Plans every global batch with every partitioner; `identity` is what the loader deals.

    Args:
        lengths: `(N,)` of all histories.
        cost: Quadratic by default.
        bytes_per_item: What an item weighs when its sample moves.
        seed: Of the order in which samples are dealt; None keeps the data's.
        step_done: Called after each step of each partitioner.

    Raises:
        ValueError: Fewer rows than one global batch, or an unknown partitioner.
    """
    if bytes_per_item < 0:
        raise ValueError(f"bytes_per_item must be at least 0, got {bytes_per_item}")
    if bytes_per_item * int(lengths.sum()) >= 2**62:
        raise ValueError(f"all items must have less than 2^62 bytes, bytes_per_item is {bytes_per_item}")
    worlds = list(_worlds(_dealt(lengths, ranks, batch_size, most_steps, seed), ranks, cost, bytes_per_item))
    as_dealt = sum(_slowest(world, world.rank) for world in worlds)
    trials: list[Trial] = []
    for name in partitioners:
        partition = make(name)
        partition(worlds[0], RuntimeInfo())  # compiles
        partition = make(name)  # one that learns begins anew
        plans: list[Assignment] = []
        times: list[float] = []
        for step, world in enumerate(worlds):
            start = time.perf_counter()
            plans.append(partition(world, RuntimeInfo(step=step)))
            times.append(1000 * (time.perf_counter() - start))
            step_done()
        trials.append(_trial(name, worlds, plans, as_dealt, float(np.median(times))))
    return trials


def by_longest(
    lengths: Ints,
    *,
    ranks: int,
    batch_size: int,
    cost: CostModel | None = None,
    limits: Sequence[int] = LIMITS,
    most_steps: int = 100,
    seed: int | None = 0,
) -> list[Point]:
    """Figure 2: straggler percentage and sparsity as dealt, over the longest history that training permits."""
    dealt = _dealt(lengths, ranks, batch_size, most_steps, seed)
    points: list[Point] = []
    for limit in limits:
        worlds = list(_worlds(dealt.clip(max=limit), ranks, cost, 8))
        slowest = sum(_slowest(world, world.rank) for world in worlds)
        trial = _trial("identity", worlds, [identity(world, RuntimeInfo()) for world in worlds], slowest, 0.0)
        points.append(Point(max_uih=limit, straggler_share=trial.straggler_share, sparsity=trial.sparsity))
    return points


def sparsity(lengths: Ints, rank: Ints, ranks: int) -> NDArray[np.float64]:
    """`(R,)`: equation 1, 1 − Σ|uih| / (max|uih| · B), of each rank's batch; 0 for one without items."""
    longest = np.zeros(ranks, np.int64)
    np.maximum.at(longest, rank, lengths)
    padded = longest * np.bincount(rank, minlength=ranks)
    share = np.ones(ranks)
    np.divide(sum_by_rank(rank, lengths, ranks), padded, out=share, where=padded > 0)
    return 1 - share


def _dealt(lengths: Ints, ranks: int, batch_size: int, most_steps: int, seed: int | None) -> Ints:
    """`(S, R·B)`: lengths of whole global batches."""
    if min(ranks, batch_size, most_steps) < 1:
        raise ValueError(f"ranks, batch size and steps must be at least 1, got {ranks}, {batch_size}, {most_steps}")
    each = ranks * batch_size
    steps = min(most_steps, len(lengths) // each)
    if not steps:
        raise ValueError(
            f"a global batch takes {ranks} ranks × {batch_size} = {each} rows, the data has {len(lengths)}; "
            "take fewer ranks, smaller batches, or more data"
        )
    order = np.arange(len(lengths)) if seed is None else np.random.default_rng(seed).permutation(len(lengths))
    return lengths[order[: steps * each]].reshape(steps, each)


def _worlds(dealt: Ints, ranks: int, cost: CostModel | None, bytes_per_item: int) -> Iterator[WorldBatch]:
    rank = np.repeat(np.arange(ranks), dealt.shape[1] // ranks)
    none = np.zeros(dealt.shape[1], np.int64)
    for lengths in dealt:
        features = Features(
            rank=rank, num_tokens=lengths, num_candidates=none, content_sum=none, content_sum_of_squares=none,
            num_bytes=bytes_per_item * lengths,
        )  # fmt: skip
        costs = (cost or Quadratic())(features)
        yield WorldBatch(world_size=ranks, rank=rank, cost=costs, num_tokens=lengths, num_bytes=features.num_bytes)


def _slowest(world: WorldBatch, destination: Assignment) -> int:
    return int(sum_by_rank(destination, world.cost, world.world_size).max())


def _share_less(less: float, than: float) -> float:
    return 1 - less / than if than else 0.0


def _trial(
    name: str, worlds: Sequence[WorldBatch], plans: Sequence[Assignment], as_dealt: int, plan_ms: float
) -> Trial:
    ranks = worlds[0].world_size
    slowest = sum(map(_slowest, worlds, plans))
    busy = sum(int(w.cost.sum()) for w in worlds) / ranks
    reports: list[PlanReport] = list(map(report, worlds, plans))
    wasted = [sparsity(w.num_tokens, p, ranks).mean() for w, p in zip(worlds, plans, strict=True)]
    total_bytes = sum(int(w.num_bytes.sum()) for w in worlds)
    moved = sum(int(w.num_bytes[p != w.rank].sum()) for w, p in zip(worlds, plans, strict=True))
    return Trial(
        partitioner=name,
        straggler_share=_share_less(busy, slowest),
        saved_share=_share_less(slowest, as_dealt),
        sparsity=float(np.mean(wasted)),
        imbalance=float(np.mean([r.imbalance for r in reports])),
        bound=float(np.mean([r.bound for r in reports])),
        bytes_moved_share=moved / max(total_bytes, 1),
        busiest_rank_bytes=float(np.mean([r.busiest_rank_bytes for r in reports])),
        plan_ms=plan_ms,
    )
