"""Synthetic histories: lengths as the paper describes them, items that a sequence model can learn, any number of users.

The paper's users: a majority has more than 2,000 items, few more than 16,000, none more than 21,000. A lognormal of
median 3,500 and σ 0.9, clipped, gives that; a shorter `max_length` scales the median with it.

Items: popularity is Zipf-like, and an item is followed by one of a few successors of its own most of the time, so that
a model's loss really falls as it learns them.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

Ints = NDArray[np.int64]

_PAPER_MAX, _PAPER_MEDIAN, _SIGMA = 21_000, 3_500, 0.9
_SUCCESSORS = 4
_MOST_ITEMS = 2**53
_MULTIPLIER = 0x9E3779B97F4A7C15 >> 1  # odd after the shift and | 1: a bijection of 64-bit integers


@dataclass(frozen=True, slots=True)
class ItemWalk:
    """How users go from item to item."""

    num_items: int
    exponent: float
    """Of the Zipf-like popularity; 0 makes all items alike, more makes consecutive batches share more rows."""
    follow: float
    """How often the next item is a successor of the one before."""

    def popular(self, rng: np.random.Generator, n: int) -> Ints:
        """`(n,)` items from 1 to `num_items`, by popularity: the inverse of the distribution's cumulative function."""
        u = rng.random(n)
        if abs(self.exponent - 1) < 1e-9:
            rank = np.exp(u * np.log(self.num_items + 1))
        else:
            power = 1 - self.exponent
            rank = (u * ((self.num_items + 1) ** power - 1) + 1) ** (1 / power)
        return np.clip(rank.astype(np.int64), 1, self.num_items)

    def histories(self, rng: np.random.Generator, lengths: Ints) -> Ints:
        """Items of all users, back to back: all users take their t-th step together."""
        offsets = np.concatenate(([0], np.cumsum(lengths)))
        items = self.popular(rng, int(offsets[-1]))
        follows = rng.random(len(items)) < self.follow
        which = rng.integers(0, _SUCCESSORS, len(items))
        by_length = np.argsort(-lengths, kind="stable")  # those who still walk at step t come first
        still = np.searchsorted(-lengths[by_length], -np.arange(1, lengths.max(initial=0) + 1), side="right")
        for t in range(1, len(still)):
            place = offsets[:-1][by_length[: still[t]]] + t
            place = place[follows[place]]
            items[place] = self.successor(items[place - 1], which[place])
        return items

    def successor(self, item: Ints, which: Ints) -> Ints:
        """The `which`-th item that tends to follow `item`, popular items more often than not."""
        mixed = (item * _SUCCESSORS + which).astype(np.uint64) * np.uint64(_MULTIPLIER | 1)
        u = (mixed >> np.uint64(11)).astype(np.float64) / 2**53
        return 1 + (u**2 * self.num_items).astype(np.int64)


def num_items_for(
    collision_share: float,
    *,
    batch_rows: int,
    max_length: int = _PAPER_MAX,
    exponent: float = 1.05,
    follow: float = 0.8,
    seed: int = 0,
) -> int:
    """The number of items with which consecutive batches of `batch_rows` histories share that much of their ids.

    The fewer the items, the more of a batch's distinct ids were in the one before. Found to one per cent of all ids, by
    bisection on drawn batches.

    Raises:
        ValueError: No number of items from 1 to 2⁴⁰ gives the share; popular items recur whatever their number.
    """
    if batch_rows < 1:
        raise ValueError(f"batch_rows must be at least 1, got {batch_rows}")
    _check(max_length, exponent, follow, seed)
    lengths = draw_lengths(np.random.default_rng((seed, 1)), batch_rows, max_length=max_length)

    def share(power: float) -> float:
        rng, walk = np.random.default_rng((seed, 2)), ItemWalk(round(2**power), exponent, follow)
        now, later = (np.unique(walk.histories(rng, lengths)) for _ in range(2))
        return float(np.isin(later, now, assume_unique=True).mean())

    few, many = 0.0, 40.0
    least = share(many)
    if not least <= collision_share <= 1:
        raise ValueError(
            f"with exponent {exponent:g}, consecutive batches of {batch_rows} histories share {least:.1%} of their ids "
            f"or more, not {collision_share:.1%}; make the exponent or the batches smaller"
        )
    while many - few > 0.05:
        middle = (few + many) / 2
        found = share(middle)
        if abs(found - collision_share) < 0.01:
            return round(2**middle)
        few, many = (middle, many) if found > collision_share else (few, middle)
    return round(2**few)


def draw_lengths(rng: np.random.Generator, n: int, *, max_length: int, min_length: int = 3) -> Ints:
    """`(n,)` history lengths, distributed as the paper's, scaled to `max_length`."""
    median = _PAPER_MEDIAN * max_length / _PAPER_MAX
    return rng.lognormal(np.log(median), _SIGMA, n).clip(min_length, max_length).astype(np.int64)


def write_histories(
    path: str | Path,
    *,
    num_users: int,
    num_items: int = 1_000_000,
    max_length: int = _PAPER_MAX,
    exponent: float = 1.05,
    follow: float = 0.8,
    seed: int = 0,
    rows_per_group: int = 256,
    written: Callable[[int], None] = lambda rows: None,
) -> None:
    """Writes a parquet file of histories: columns `user` int64, `history` list<int64>, `validation` and `test` int64.

    The last two items of each user are held out. Memory stays that of one row group, whatever the number of users; the
    same arguments give the same file. `written` is called with the number of rows of each group.

    Raises:
        ValueError: A number outside its range.
    """
    for name, value in {"num_users": num_users, "num_items": num_items, "rows_per_group": rows_per_group}.items():
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
    _check(max_length, exponent, follow, seed)
    if num_items > _MOST_ITEMS:
        raise ValueError(f"num_items must be at most 2^53, which floats tell apart, got {num_items}")
    if rows_per_group * max_length >= 2**31:
        raise ValueError(
            f"a row group must hold less than 2^31 items, {rows_per_group} users of up to {max_length} may have more: "
            "make rows_per_group or max_length smaller"
        )
    walk = ItemWalk(num_items, exponent, follow)
    names = ["user", "history", "validation", "test"]
    schema = pa.schema([(n, pa.list_(pa.int64()) if n == "history" else pa.int64()) for n in names])
    with _whole(path), pq.ParquetWriter(path, schema) as writer:
        for first in range(0, num_users, rows_per_group):
            n = min(rows_per_group, num_users - first)
            rng = np.random.default_rng((seed, first))
            lengths = draw_lengths(rng, n, max_length=max_length)
            items = walk.histories(rng, lengths)
            ends = np.cumsum(lengths)
            kept = np.ones(len(items), bool)
            kept[ends - 1] = kept[ends - 2] = False
            offsets = np.concatenate(([0], np.cumsum(lengths - 2))).astype(np.int32)
            columns = [
                pa.array(np.arange(first, first + n)),
                pa.ListArray.from_arrays(pa.array(offsets), pa.array(items[kept])),
                pa.array(items[ends - 2]),
                pa.array(items[ends - 1]),
            ]
            writer.write_table(pa.table(columns, schema=schema), row_group_size=n)
            written(n)


@contextmanager
def _whole(path: str | Path) -> Iterator[None]:
    """Leaves no file where writing it ends early: its writer completes it, and it would pass for a whole one."""
    try:
        yield
    except BaseException:
        if Path(path).is_file():
            Path(path).unlink()
        raise


def _check(max_length: int, exponent: float, follow: float, seed: int) -> None:
    if not 0 <= exponent <= 10 or not 0 <= follow <= 1:
        raise ValueError(f"exponent must be from 0 to 10 and follow from 0 to 1, got {exponent} and {follow}")
    if max_length < 3:
        raise ValueError(f"max_length must be at least 3, one item to train on and two held out, got {max_length}")
    if max_length >= 2**31:
        raise ValueError(f"max_length must be less than 2^31, got {max_length}")
    if seed < 0:
        raise ValueError(f"seed must be at least 0, got {seed}")
