"""`fs-data balance`: what stragglers would cost on this data, and what each partitioner would save."""

from typing import Annotated

import typer

from fs_data.cli.console import AsJson, Data, one_line_errors, per_cent, progress, say, say_json, show
from fs_data.trial import PARTITIONERS, by_longest, cost_model, read_lengths, try_partitioners


def balance(
    data: Data,
    ranks: Annotated[int, typer.Option(help="Ranks to train on.")] = 8,
    batch: Annotated[int, typer.Option(help="Samples a rank and step.")] = 128,
    column: Annotated[str, typer.Option(help="Column of histories: lists of items, or their lengths.")] = "history",
    cost: Annotated[
        str,
        typer.Option(
            help="linear, power:ALPHA, quadratic, quadratic:PER_ITEM,PER_ITEM_SQUARED, or a CSV of measured times with "
            "the columns length, ms and, if not 1, samples.",
        ),
    ] = "quadratic",
    partitioner: Annotated[list[str] | None, typer.Option(help="May be given several times; all by default.")] = None,
    steps: Annotated[int, typer.Option(help="Most steps to plan.")] = 100,
    bytes_per_item: Annotated[int, typer.Option(help="What an item weighs when its sample moves.")] = 8,
    in_order: Annotated[bool, typer.Option("--in-order", help="Deal rows in the data's order, not shuffled.")] = False,
    as_json: AsJson = False,
) -> None:
    """What stragglers would cost on this data, and what each partitioner would save. Nothing is trained.

    A straggler percentage is the mean idle time of ranks over the time of a step; sparsity is equation 1 of the paper,
    what padding each rank's batch would waste; at best is what no plan can beat, where one sample outweighs a rank's
    mean; moved is the share of bytes that change rank, busiest the most that a rank sends or takes, in mean batches.
    """
    with one_line_errors():
        model, seed, names = cost_model(cost), None if in_order else 0, partitioner or PARTITIONERS
        with progress("reading lengths") as done:
            lengths = read_lengths(data, column, done)
        with progress("planning", min(steps, len(lengths) // max(ranks * batch, 1)) * len(names)) as done:
            trials = try_partitioners(
                lengths, ranks=ranks, batch_size=batch, cost=model, partitioners=names, most_steps=steps,
                bytes_per_item=bytes_per_item, seed=seed, step_done=lambda: done(1),
            )  # fmt: skip
        points = by_longest(lengths, ranks=ranks, batch_size=batch, cost=model, most_steps=steps, seed=seed)
    if as_json:
        say_json(rows=len(lengths), ranks=ranks, batch=batch, cost=str(model), trials=trials, by_longest=points)
        return
    say(f"{len(lengths):,} histories on {ranks} ranks × {batch}; cost of a sample: {model}")
    show(
        "Plans",
        ["plan", "straggler", "saved", "sparsity", "at best", "moved", "busiest", "ms"],
        [
            [
                "as dealt" if t.partitioner == "identity" else t.partitioner,
                per_cent(t.straggler_share), per_cent(t.saved_share), per_cent(t.sparsity), per_cent(t.bound),
                per_cent(t.bytes_moved_share), f"{t.busiest_rank_bytes:.2f}", f"{t.plan_ms:.1f}",
            ]
            for t in trials
        ],
    )  # fmt: skip
    show(
        "As dealt, by the longest history that training permits",
        ["items", "straggler", "sparsity"],
        [[f"{p.max_uih:,}", per_cent(p.straggler_share), per_cent(p.sparsity)] for p in points],
    )
