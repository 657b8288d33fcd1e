"""What a file of histories is like: how long they are, what padding them would waste, how many ids batches share.

The paper's figures 2 (sparsity) and 3 (ID collisions), for users' own data.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray

from fs_data.jagged import JaggedColumn
from fs_data.trial import LIMITS, column_of, sparsity

Ints = NDArray[np.int64]

PERCENTILES = (0, 10, 25, 50, 75, 90, 99, 100)


@dataclass(frozen=True, kw_only=True, slots=True)
class Lengths:
    rows: int
    items: int
    mean: float
    percentiles: dict[int, int]
    """Of the items of a row; 0 is the shortest and 100 the longest."""
    over_2_000: float
    """Share of rows with more items than that; the paper has a majority."""
    over_16_000: float
    histogram: list[tuple[int, int]]
    """Most items of each of at most 24 equally wide classes, and its number of rows."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sparsity:
    batch_size: int
    max_uih: int
    """Histories are cut to their newest that many items."""
    sparsity: float
    """Equation 1, in the mean over batches."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Collisions:
    """Two consecutive global batches: what prioritized embeddings have to wait for."""

    ranks: int
    batch_size: int
    collision_share: float
    """Of the distinct ids of a global batch, those that are in the one before too."""
    distinct_share: float
    """Distinct ids of a global batch over all its ids: what de-duplication leaves to exchange."""


def describe(lengths: Ints) -> Lengths:
    """
    Raises:
        ValueError: No rows.
    """
    if not len(lengths):
        raise ValueError("the data must have at least one row, it has none")
    longest = int(lengths.max())
    width = longest // 24 + 1
    counts = np.bincount(lengths // width).tolist()
    return Lengths(
        rows=len(lengths),
        items=int(lengths.sum()),
        mean=float(lengths.mean()),
        percentiles={p: int(np.percentile(lengths, p)) for p in PERCENTILES},
        over_2_000=float((lengths > 2_000).mean()),
        over_16_000=float((lengths > 16_000).mean()),
        histogram=[(min((k + 1) * width - 1, longest), count) for k, count in enumerate(counts)],
    )


def sparsities(
    lengths: Ints, *, batch_sizes: Sequence[int] = (32, 128, 512), limits: Sequence[int] = LIMITS
) -> list[Sparsity]:
    """Equation 1 over batches of consecutive rows; batch sizes beyond the data are left out."""
    _check_positive(batch_sizes, "batch sizes")
    found: list[Sparsity] = []
    for size in (b for b in batch_sizes if b <= len(lengths)):
        whole = lengths[: len(lengths) // size * size]
        batch = np.arange(len(whole)) // size
        for limit in limits:
            share = sparsity(whole.clip(max=limit), batch, len(whole) // size).mean()
            found.append(Sparsity(batch_size=size, max_uih=limit, sparsity=float(share)))
    return found


def collisions(
    source: str,
    column: str = "history",
    *,
    ranks: Sequence[int] = (1, 8, 64),
    batch_sizes: Sequence[int] = (32, 128),
    pairs: int = 3,
    most_ids: int = 64_000_000,
    seen: Callable[[int], None] = lambda rows: None,
) -> list[Collisions]:
    """Ids that consecutive global batches share, in the data's order, in the mean over `pairs` of them.

    Args:
        pairs: Of consecutive batches, for each number of ranks and batch size.
        most_ids: Reads no more than the first that many ids; settings with larger batches are left out.
        seen: Called with the number of rows of each part that was read.

    Raises:
        ParquetError: No such column, or a broken file.
        ValueError: A column that is not of lists of integers, or a number below 1.
    """
    _check_positive(ranks, "ranks")
    _check_positive(batch_sizes, "batch sizes")
    settings = sorted({(r, b) for r in ranks for b in batch_sizes}, key=lambda s: s[0] * s[1])
    most_rows = settings[-1][0] * settings[-1][1] * (pairs + 1) if settings else 0
    values, offsets = _first_ids(source, column, most_rows, most_ids, seen)
    num_rows = len(offsets) - 1
    found: list[Collisions] = []
    for num_ranks, batch_size in settings:
        each = num_ranks * batch_size
        if 2 * each > num_rows:
            break
        starts = range(0, min(num_rows // each, pairs + 1) * each, each)
        batches = [values[offsets[s] : offsets[s + each]] for s in starts]
        distinct = [pa.array(b).unique().to_numpy() for b in batches]
        shared = [
            np.isin(later, now, assume_unique=True).sum() / max(len(later), 1) for now, later in pairwise(distinct)
        ]
        found.append(
            Collisions(
                ranks=num_ranks,
                batch_size=batch_size,
                collision_share=float(np.mean(shared)),
                distinct_share=sum(map(len, distinct)) / max(sum(map(len, batches)), 1),
            )
        )
    return found


def _check_positive(numbers: Sequence[int], what: str) -> None:
    if min(numbers, default=1) < 1:
        raise ValueError(f"{what} must be at least 1, got {list(numbers)}")


def _first_ids(
    source: str, column: str, most_rows: int, most_ids: int, seen: Callable[[int], None]
) -> tuple[Ints, Ints]:
    """Values `(M,)` and offsets `(N + 1,)` of the first rows."""
    parts: list[JaggedColumn] = []
    rows = ids = 0
    for part in _parts(source, column):
        parts.append(part)
        rows, ids = rows + len(part), ids + len(part.values)
        seen(len(part))
        if rows >= most_rows or ids >= most_ids:
            break
    if not parts:
        return np.zeros(0, np.int64), np.zeros(1, np.int64)
    lengths = np.concatenate([p.lengths.numpy() for p in parts])
    return np.concatenate([p.values.numpy() for p in parts]), np.concatenate([[0], np.cumsum(lengths)])


def _parts(source: str, column: str) -> Iterator[JaggedColumn]:
    for part in column_of(source, column, batch_size=256):
        if not isinstance(part, JaggedColumn) or not _are_ids(part.values):
            raise ValueError(f"{column!r} must hold lists of integer ids")
        yield part


def _are_ids(values: torch.Tensor) -> bool:
    return values.dim() == 1 and not values.is_floating_point() and values.dtype != torch.bool
