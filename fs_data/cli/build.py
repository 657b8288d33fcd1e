"""`fs-data build`: histories from a log of interactions."""

from pathlib import Path
from typing import Annotated

import typer

from fs_data.build import Split, build_histories
from fs_data.cli.console import AsJson, one_line_errors, progress, say, say_json, show
from fs_data.survey import describe
from fs_data.trial import read_lengths


def build(
    log: Annotated[Path, typer.Argument(help="Parquet, CSV with a header, or text of `user item [time]` lines.")],
    out: Annotated[Path, typer.Argument(help="Parquet file to write.")],
    user: Annotated[str, typer.Option(help="Column of users.")] = "user",
    item: Annotated[str, typer.Option(help="Column of items.")] = "item",
    time: Annotated[str | None, typer.Option(help="Column that orders a user's items; else the log's order.")] = None,
    split: Annotated[Split, typer.Option(help="leave-one-out holds out a user's last two items.")] = "leave-one-out",
    memory_limit: Annotated[str, typer.Option(help="What DuckDB may hold; the rest spills to disk.")] = "2GB",
    as_json: AsJson = False,
) -> None:
    """Groups a log of interactions into one row a user, items in order of time; larger than memory is fine."""
    with one_line_errors():
        with progress("grouping interactions"):
            build_histories(log, out, user=user, item=item, time=time, split=split, memory_limit=memory_limit)
        found = describe(read_lengths(str(out)))
    if as_json:
        say_json(out=str(out), histories=found)
        return
    say(f"{out}: {found.rows:,} histories")
    show("Items of a history (held-out ones left out)", [f"{p} %" for p in found.percentiles], [
        [f"{n:,}" for n in found.percentiles.values()]
    ])  # fmt: skip
