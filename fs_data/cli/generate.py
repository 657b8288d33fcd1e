"""`fs-data generate`: a parquet file of synthetic histories, as long as the paper's."""

from pathlib import Path
from typing import Annotated

import typer

from fs_data.cli.console import AsJson, one_line_errors, progress, say, say_json
from fs_data.generate import num_items_for, write_histories


def generate(
    out: Annotated[Path, typer.Argument(help="Parquet file to write.", metavar="OUT")],
    users: Annotated[int, typer.Option(help="Rows.")] = 10_000,
    items: Annotated[int | None, typer.Option(help="Distinct items; 1,000,000 unless --collisions decides.")] = None,
    max_length: Annotated[int, typer.Option(help="Longest history; the others scale with it.")] = 21_000,
    exponent: Annotated[float, typer.Option(help="Of the items' Zipf-like popularity; 0 makes all alike.")] = 1.05,
    collisions: Annotated[
        float | None,
        typer.Option(help="Share of a global batch's ids that the one before has too: decides the number of items."),
    ] = None,
    batch: Annotated[int, typer.Option(help="Samples of the global batch that --collisions is about.")] = 128,
    seed: Annotated[int, typer.Option(help="The same one gives the same file.")] = 0,
    rows_per_group: Annotated[int, typer.Option(help="Users a row group.")] = 256,
    as_json: AsJson = False,
) -> None:
    """Writes synthetic histories: most have more than 2,000 items, few more than 16,000, none more than 21,000.

    Columns: user, history, and the two held-out items validation and test. An item tends to be followed by one of a few
    successors, so that a model's loss falls as it learns them.
    """
    with one_line_errors():
        if collisions is not None:
            if items is not None:
                raise ValueError("--items and --collisions must not be given together: the collisions decide the items")
            with progress("finding the number of items"):
                items = num_items_for(collisions, batch_rows=batch, max_length=max_length, exponent=exponent, seed=seed)
        items = 1_000_000 if items is None else items
        with progress("writing histories", users) as done:
            write_histories(
                out, num_users=users, num_items=items, max_length=max_length, exponent=exponent, seed=seed,
                rows_per_group=rows_per_group, written=done,
            )  # fmt: skip
    if as_json:
        say_json(out=str(out), users=users, items=items, bytes=out.stat().st_size)
    else:
        say(f"{out}: {users:,} histories of up to {items:,} items, {out.stat().st_size / 1e6:,.1f} MB")
