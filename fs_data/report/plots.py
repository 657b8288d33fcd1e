"""Plots as inline SVG: bars and lines that take the page's colours, and scale with it.

Each plot is 460 × 240 units with text 13 units high, so that it can be read on a phone, too.
"""

from collections.abc import Sequence
from html import escape

WIDTH, HEIGHT = 460, 240
_LEFT, _RIGHT, _TOP, _BOTTOM = 50, 24, 18, 42
_INNER_WIDTH, _INNER_HEIGHT = WIDTH - _LEFT - _RIGHT, HEIGHT - _TOP - _BOTTOM


def bars(labels: Sequence[str], values: Sequence[float], *, unit: str = "", every: int = 1, name: str) -> str:
    """One bar a label, with its value above it unless there are many; every `every`-th label is written."""
    top = _nice(max(values, default=0.0))
    slot = _INNER_WIDTH / max(len(values), 1)
    parts = [_grid(top, unit)]
    for i, (label, value) in enumerate(zip(labels, values, strict=True)):
        height = _INNER_HEIGHT * value / top
        x, y = _LEFT + slot * (i + 0.12), _TOP + _INNER_HEIGHT - height
        middle = x + slot * 0.38
        title = f"<title>{escape(label)}: {value:,.4g}{unit}</title>"
        parts.append(
            f'<rect class="c0" x="{x:.1f}" y="{y:.1f}" width="{slot * 0.76:.1f}" height="{height:.1f}" rx="2">'
            f"{title}</rect>"
        )
        if len(values) <= 8:
            parts.append(f'<text class="value" x="{middle:.1f}" y="{y - 5:.1f}">{value:,.1f}{unit}</text>')
        if i % every == 0:
            parts.append(f'<text class="x" x="{middle:.1f}" y="{HEIGHT - 22}">{escape(label)}</text>')
    return _svg(parts, name)


def lines(
    xs: Sequence[float], series: Sequence[tuple[str, Sequence[float]]], *, unit: str = "", x_unit: str = "", name: str
) -> str:
    """One line a series over `xs`, each named where it ends."""
    top = _nice(max((v for _, values in series for v in values), default=0.0))
    most = max(xs, default=1.0) or 1.0
    parts = [_grid(top, unit)]
    for x in _ticks(xs):
        parts.append(f'<text class="x" x="{_LEFT + _INNER_WIDTH * x / most:.1f}" y="{HEIGHT - 22}">{x:,.0f}</text>')
    parts.append(f'<text class="x" x="{_LEFT + _INNER_WIDTH / 2:.1f}" y="{HEIGHT - 4}">{escape(x_unit)}</text>')
    for i, (label, values) in enumerate(series):
        points = [
            (_LEFT + _INNER_WIDTH * x / most, _TOP + _INNER_HEIGHT * (1 - v / top))
            for x, v in zip(xs, values, strict=True)
        ]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        parts.append(f'<polyline class="line s{i}" points="{path}"/>')
        for (x, y), at, value in zip(points, xs, values, strict=True):
            title = f"<title>{escape(label)} at {at:,.0f}: {value:,.3g}{unit}</title>"
            parts.append(f'<circle class="c{i}" cx="{x:.1f}" cy="{y:.1f}" r="4">{title}</circle>')
        if points:
            x, y = points[-1]
            parts.append(f'<text class="end" x="{x - 6:.1f}" y="{max(y - 9, 13):.1f}">{escape(label)}</text>')
    return _svg(parts, name)


def _svg(parts: Sequence[str], name: str) -> str:
    return (
        f'<svg class="plot" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(name, quote=True)}">'
        f"{''.join(parts)}</svg>"
    )


def _grid(top: float, unit: str) -> str:
    parts: list[str] = []
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        y = _TOP + _INNER_HEIGHT * (1 - share)
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text class="y" x="{_LEFT - 6}" y="{y + 5:.1f}">{_short(top * share)}{unit}</text>')
    return "".join(parts)


def _ticks(xs: Sequence[float]) -> list[float]:
    """Those of `xs` whose labels do not touch."""
    ticks: list[float] = []
    for x in sorted(xs):
        if not ticks or x - ticks[-1] > 0.13 * max(xs):
            ticks.append(x)
    return ticks


def _nice(most: float) -> float:
    """The least of 1, 2, 2.5, 4, 5, 8 times a power of ten that is not below `most`."""
    power = 1.0
    while power < most:
        power *= 10
    while power / 10 >= most > 0:
        power /= 10
    return next(power / 10 * f for f in (1, 2, 2.5, 4, 5, 8, 10) if power / 10 * f >= most)


def _short(value: float) -> str:
    if value >= 1e6:
        return f"{value / 1e6:g} M"
    return f"{value / 1e3:g} k" if value >= 1e4 else f"{value:g}"
