"""`fs-data report`: inspect and balance on one page."""

from pathlib import Path
from typing import Annotated

import typer

from fs_data.cli.console import AsJson, Column, Data, one_line_errors, progress, say, say_json
from fs_data.report import page
from fs_data.survey import collisions, describe, sparsities
from fs_data.trial import PARTITIONERS, by_longest, cost_model, read_lengths, try_partitioners


def report(
    data: Data,
    out: Annotated[Path, typer.Option(help="HTML file to write.")] = Path("report.html"),
    ranks: Annotated[int, typer.Option(help="Ranks to train on.")] = 8,
    batch: Annotated[int, typer.Option(help="Samples a rank and step.")] = 128,
    column: Column = "history",
    cost: Annotated[str, typer.Option(help="As for balance.")] = "quadratic",
    steps: Annotated[int, typer.Option(help="Most steps to plan.")] = 100,
    as_json: AsJson = False,
) -> None:
    """One self-contained HTML page with plots of what inspect and balance say; light or dark, readable on a phone."""
    with one_line_errors():
        model = cost_model(cost)
        if out.exists() and Path(data).exists() and out.samefile(data):
            raise ValueError(f"the page must go to a file of its own, {out} is the data")
        with progress("reading lengths") as done:
            lengths = read_lengths(data, column, done)
        found = describe(lengths)
        with progress("planning", min(steps, len(lengths) // max(ranks * batch, 1)) * len(PARTITIONERS)) as done:
            trials = try_partitioners(
                lengths, ranks=ranks, batch_size=batch, cost=model, most_steps=steps, step_done=lambda: done(1)
            )
        with progress("reading ids") as done:
            shared = collisions(data, column, ranks=sorted({1, ranks}), batch_sizes=(32, batch), seen=done)
        html = page(
            data, ranks=ranks, batch_size=batch, cost=str(model), lengths=found,
            sparsities=sparsities(lengths, batch_sizes=sorted({32, batch})), collisions=shared, trials=trials,
            by_longest=by_longest(lengths, ranks=ranks, batch_size=batch, cost=model, most_steps=steps),
        )  # fmt: skip
        out.write_text(html, encoding="utf-8")
    if as_json:
        say_json(out=str(out), bytes=out.stat().st_size)
    else:
        say(f"{out}: open it in a browser")
