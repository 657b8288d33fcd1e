"""`fs-data inspect`: how long histories are, what padding would waste, and how many ids batches share."""

from typing import Annotated

import typer

from fs_data.cli.console import AsJson, Column, Data, one_line_errors, per_cent, progress, say, say_json, show
from fs_data.survey import collisions, describe, sparsities
from fs_data.trial import read_lengths

_BATCHES, _RANKS = (32, 128), (1, 8, 64)


def inspect(
    data: Data,
    column: Column = "history",
    batch: Annotated[list[int] | None, typer.Option(help="Samples a rank; may be given several times.")] = None,
    ranks: Annotated[list[int] | None, typer.Option(help="May be given several times.")] = None,
    as_json: AsJson = False,
) -> None:
    """Lengths of histories, sparsity (equation 1, Figure 2) and ID collisions (Figure 3) of this data."""
    batches = batch or _BATCHES
    with one_line_errors():
        with progress("reading lengths") as done:
            lengths = read_lengths(data, column, done)
        found, padded = describe(lengths), sparsities(lengths, batch_sizes=batches)
        with progress("reading ids") as done:
            shared = collisions(data, column, ranks=ranks or _RANKS, batch_sizes=batches, seen=done)
    if as_json:
        say_json(lengths=found, sparsity=padded, collisions=shared)
        return
    say(
        f"{found.rows:,} histories of {found.items:,} items, {found.mean:,.0f} in the mean; "
        f"{per_cent(found.over_2_000)} have more than 2,000, {per_cent(found.over_16_000)} more than 16,000"
    )
    show("Items of a history, by percentile", [f"{p}" for p in found.percentiles], [
        [f"{n:,}" for n in found.percentiles.values()]
    ])  # fmt: skip
    sizes = sorted({s.batch_size for s in padded})
    by = {(s.max_uih, s.batch_size): per_cent(s.sparsity) for s in padded}
    show(
        "Sparsity: what padding a batch to its longest history wastes",
        ["longest permitted", *(f"batch {b}" for b in sizes)],
        [[f"{limit:,}", *(by[limit, b] for b in sizes)] for limit in dict.fromkeys(s.max_uih for s in padded)],
    )
    show(
        "IDs of a global batch that the one before has too",
        ["ranks × batch", "collisions", "distinct"],
        [[f"{c.ranks} × {c.batch_size}", per_cent(c.collision_share), per_cent(c.distinct_share)] for c in shared],
    )
