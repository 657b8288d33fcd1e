"""The page: figures in words, then plots, then the numbers behind them."""

from collections.abc import Sequence
from html import escape

from fs_data.report.plots import bars, lines
from fs_data.survey import Collisions, Lengths, Sparsity
from fs_data.trial import Point, Trial

_STYLE = """
:root { --paper: #fff; --ink: #1d2433; --soft: #5b6577; --rule: #dfe3ea; --a: #2a63c9; --b: #c2570c; --c: #1c8a5a; }
@media (prefers-color-scheme: dark) {
  :root { --paper: #14171d; --ink: #e6e9ef; --soft: #9aa4b5; --rule: #2c323d;
          --a: #7aa7ff; --b: #ffa45c; --c: #5fd39b; }
}
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 60rem; padding: 1.5rem 1rem 4rem; background: var(--paper); color: var(--ink);
       font: 16px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.5rem; margin: 0 0 .25rem; } h2 { font-size: 1.15rem; margin: 2rem 0 .25rem; }
p { margin: .25rem 0 .75rem; } .soft { color: var(--soft); }
.plot { width: 100%; max-width: 42rem; height: auto; display: block; }
.plot text { font: 13px system-ui, sans-serif; fill: var(--soft); }
.plot .x, .plot .value { text-anchor: middle; } .plot .y, .plot .end { text-anchor: end; }
.plot .value, .plot .end { fill: var(--ink); }
.grid { stroke: var(--rule); } .line { fill: none; stroke-width: 2.5; }
.c0 { fill: var(--a); } .c1 { fill: var(--b); } .c2 { fill: var(--c); }
.s0 { stroke: var(--a); } .s1 { stroke: var(--b); } .s2 { stroke: var(--c); }
.scroll { overflow-x: auto; } table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .3rem .7rem; text-align: right; border-bottom: 1px solid var(--rule); white-space: nowrap; }
th:first-child, td:first-child { text-align: left; } th { font-weight: 600; }
"""


def page(
    source: str,
    *,
    ranks: int,
    batch_size: int,
    cost: str,
    lengths: Lengths,
    sparsities: Sequence[Sparsity],
    collisions: Sequence[Collisions],
    trials: Sequence[Trial],
    by_longest: Sequence[Point],
) -> str:
    """HTML without anything to load; light or dark as the reader's system is."""
    name = escape(source)
    sections = [
        f"<h1>Histories of {name}</h1>",
        f'<p class="soft">{lengths.rows:,} histories, {lengths.items:,} items; {ranks} ranks × {batch_size}; '
        f"cost of a sample: {escape(cost)}</p>",
        f"<p>{_verdict(trials)}</p>",
        *_length_section(lengths),
        *_straggler_section(trials, by_longest),
        *_sparsity_section(sparsities),
        *_collision_section(collisions),
    ]
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>Histories of {name}</title><style>{_STYLE}</style></head><body>{''.join(sections)}</body></html>\n"
    )


def _verdict(trials: Sequence[Trial]) -> str:
    dealt = next((t for t in trials if t.partitioner == "identity"), None)
    others = [t for t in trials if t.partitioner != "identity"]
    if dealt is None or not others:
        return ""
    best = max(others, key=lambda t: (round(t.saved_share, 2), -t.bytes_moved_share))
    return (
        f"As dealt, ranks would wait for <b>{_pc(dealt.straggler_share)}</b> of a step's computing time. With "
        f"<b>{escape(best.partitioner)}</b> it would be {_pc(best.straggler_share)}: {_pc(best.saved_share)} of the "
        f"time saved, for {_pc(best.bytes_moved_share)} of the bytes moved between ranks."
    )


def _length_section(lengths: Lengths) -> list[str]:
    every = max(1, len(lengths.histogram) // 4)
    plot = bars(
        [f"{edge:,}" for edge, _ in lengths.histogram],
        [count for _, count in lengths.histogram],
        every=every,
        name="Number of histories by length",
    )
    head = [f"{p} %" for p in lengths.percentiles]
    return [
        "<h2>Lengths</h2>",
        f"<p>{_pc(lengths.over_2_000)} of histories have more than 2,000 items, {_pc(lengths.over_16_000)} more than "
        f"16,000; the mean is {lengths.mean:,.0f}. Bars: histories up to the length below.</p>",
        plot,
        _table(["percentile", *head], [["items", *(f"{n:,}" for n in lengths.percentiles.values())]]),
    ]


def _straggler_section(trials: Sequence[Trial], by_longest: Sequence[Point]) -> list[str]:
    names = ["as dealt" if t.partitioner == "identity" else t.partitioner for t in trials]
    rows = [
        [
            name, _pc(t.straggler_share), _pc(t.saved_share), _pc(t.sparsity), _pc(t.bound), _pc(t.bytes_moved_share),
            f"{t.busiest_rank_bytes:.2f}", f"{t.plan_ms:.1f}",
        ]
        for name, t in zip(names, trials, strict=True)
    ]  # fmt: skip
    return [
        "<h2>Stragglers</h2>",
        "<p>The mean idle time of ranks over the time of a step, which its slowest rank decides.</p>",
        bars(names, [100 * t.straggler_share for t in trials], unit=" %", name="Straggler percentage by plan"),
        _table(
            ["plan", "straggler", "time saved", "sparsity", "at best", "bytes moved", "busiest rank", "ms a plan"], rows
        ),
        "<p>As dealt, by the longest history that training permits:</p>",
        lines(
            [p.max_uih for p in by_longest],
            [
                ("sparsity", [100 * p.sparsity for p in by_longest]),
                ("straggler", [100 * p.straggler_share for p in by_longest]),
            ],
            unit=" %",
            x_unit="items of the longest history",
            name="Straggler percentage and sparsity by longest history",
        ),
    ]


def _sparsity_section(sparsities: Sequence[Sparsity]) -> list[str]:
    sizes = sorted({s.batch_size for s in sparsities})
    if not sizes:
        return []
    by = {(s.batch_size, s.max_uih): 100 * s.sparsity for s in sparsities}
    limits = sorted({s.max_uih for s in sparsities})
    return [
        "<h2>Sparsity</h2>",
        "<p>What padding a batch to its longest history would waste: 1 − Σ|uih| / (max|uih| · B).</p>",
        lines(
            limits,
            [(f"batch {b}", [by[b, limit] for limit in limits]) for b in sizes[-1:]],
            unit=" %",
            x_unit="items of the longest history",
            name="Sparsity by longest history",
        ),
        _table(
            ["longest", *(f"batch {b}" for b in sizes)],
            [[f"{limit:,}", *(f"{by[b, limit]:.1f} %" for b in sizes)] for limit in limits],
        ),
    ]


def _collision_section(collisions: Sequence[Collisions]) -> list[str]:
    if not collisions:
        return []
    names = [f"{c.ranks} × {c.batch_size}" for c in collisions]
    return [
        "<h2>ID collisions</h2>",
        "<p>Distinct ids of a global batch (ranks × samples) that the one before has too: the rows whose exchange "
        "prioritized embeddings cannot hide.</p>",
        bars(
            names,
            [100 * c.collision_share for c in collisions],
            unit=" %",
            every=1 + len(names) // 9,
            name="ID collisions by global batch",
        ),
        _table(
            ["ranks × batch", "collisions", "distinct of all ids"],
            [[n, _pc(c.collision_share), _pc(c.distinct_share)] for n, c in zip(names, collisions, strict=True)],
        ),
    ]


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    cells = "".join(f"<tr>{''.join(f'<td>{escape(c)}</td>' for c in row)}</tr>" for row in rows)
    return f'<div class="scroll"><table><tr>{"".join(f"<th>{escape(h)}</th>" for h in head)}</tr>{cells}</table></div>'


def _pc(share: float) -> str:
    return f"{100 * share:.1f} %" if share >= 0.001 or share <= 0 else f"{100 * share:.2f} %"
