"""Errors that all ranks raise together: each is decided from gathered numbers, and names the ranks it is about."""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from fs_data.errors import Disagreement, RankFailed
from fs_data.world import World, gather_texts

Ints = NDArray[np.int64]

_LONG = 400  # characters, of which the part that differs is shown


def check_alike(world: World, values: Ints, text: Callable[[], str], way_out: str) -> None:
    """Raises Disagreement on every rank unless all `values` `(R,)` are equal; `text` is what this rank's stands for."""
    odd = _odd_ranks(values)
    if not odd:
        return
    texts = gather_texts(world, text())
    most = next(r for r in range(len(values)) if r not in odd)
    lines = [f"rank {r} has {_first_difference(texts[r], texts[most])}" for r in odd]
    raise Disagreement(f"all ranks must agree: {'; '.join(lines)} of rank {most}; {way_out}")


def raise_failures(world: World, failed: Ints, mine: BaseException | None, when: str) -> None:
    """Raises RankFailed on every rank if any of `failed` `(R,)` is set; on a failed rank its own error is the cause."""
    if not failed.any():
        return
    ranks = tuple(np.flatnonzero(failed).tolist())
    texts = gather_texts(world, f"{type(mine).__name__}: {mine}" if mine else "")
    raise RankFailed(ranks, "; ".join(f"rank {r} failed at {when}: {texts[r]}" for r in ranks)) from mine


def _odd_ranks(values: Ints) -> list[int]:
    """The ranks whose value is not the most common one; ties go to the lowest rank's value."""
    found, first, count = np.unique(values, return_index=True, return_counts=True)
    most = found[np.lexsort((first, -count))[0]]
    return np.flatnonzero(values != most).tolist()


def _first_difference(mine: str, other: str) -> str:
    a, b = mine.splitlines() or [""], other.splitlines() or [""]
    width = max(len(a), len(b))
    a, b = a + [""] * (width - len(a)), b + [""] * (width - len(b))
    x, y = next(((x, y) for x, y in zip(a, b, strict=True) if x != y), (a[0], b[0]))
    same = next((i for i, (c, d) in enumerate(zip(x, y, strict=False)) if c != d), min(len(x), len(y)))
    x, y = (t if len(t) <= _LONG else f"…{t[max(0, same - _LONG // 4) : same + _LONG // 2]}…" for t in (x, y))
    return f"'{x}' in place of '{y}'"
