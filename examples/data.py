"""From parquet histories to training and evaluation batches: shifted targets, and random items that were never seen.

The random items ("negatives") are a hash of (seed, epoch, user, position): a sample carries the same ones whichever
rank trains on it and whenever training resumes, so losses can be compared bit for bit.
"""

from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fs_data import JaggedColumn
from fs_kernels import jagged_permute

Batch = dict[str, Tensor | JaggedColumn]

_MOST_REDRAWS = 64

Column = TypeVar("Column", Tensor, JaggedColumn)


@dataclass(slots=True)
class NextItemTask:
    """Turns `{"user", "history"}` into `{"user", "seq", "pos", "neg"}`: predict each next item of the history.

    Users with fewer than two items have nothing to predict and keep an empty row.
    """

    num_items: int
    seed: int = 0
    epoch: int = 0
    """Negatives change with it."""

    def __call__(self, batch: Batch) -> Batch:
        (user,), (history,) = dense(batch, "user"), jagged(batch, "history")
        items, offsets = history.values, history.offsets
        keep_as_input = torch.ones(len(items), dtype=torch.bool)
        keep_as_target = torch.ones(len(items), dtype=torch.bool)
        full = history.lengths > 0
        keep_as_input[offsets[1:][full] - 1] = False  # the newest item has no next
        keep_as_target[offsets[:-1][full]] = False  # the oldest follows nothing
        pairs = (history.lengths - 1).clamp(min=0)
        seq = JaggedColumn.from_lengths(items[keep_as_input], pairs)
        pos = JaggedColumn(items[keep_as_target], seq.offsets)
        neg = unseen_items(history, user, pairs, self.num_items, salt=self.seed + 1000 * self.epoch)
        return {"user": user, "seq": seq, "pos": pos, "neg": JaggedColumn(neg, seq.offsets)}


@dataclass(frozen=True, slots=True)
class RankingTask:
    """Turns a row with its held-out items into `{"seq", "candidates"}`: rank one true item among random ones."""

    num_items: int
    split: str
    """`"validation"` or `"test"`; the test's input includes the validation item, which is older."""
    num_negatives: int = 100

    def __call__(self, batch: Batch) -> Batch:
        (history,) = jagged(batch, "history")
        user, truth, validation = dense(batch, "user", self.split, "validation")
        can_rank = truth != 0  # 0 stands for users with too few items
        if self.split == "validation":
            can_rank &= history.lengths > 0  # the model needs an item to start from
        held_out = can_rank.nonzero().squeeze(1)
        user, truth, validation = user[held_out], truth[held_out], validation[held_out]
        seq = JaggedColumn(*jagged_permute(history.values, history.offsets, held_out))
        if self.split == "test":
            seq = append(seq, validation)
        each = torch.full((len(user),), self.num_negatives)
        # The truth counts as seen, or it might be drawn against itself.
        negatives = unseen_items(append(seq, truth), user, each, self.num_items, salt=-1)
        candidates = torch.cat([truth[:, None], negatives.view(len(user), self.num_negatives)], dim=1)
        return {"user": user, "seq": seq, "candidates": candidates}


def jagged(batch: Batch, *names: str) -> list[JaggedColumn]:
    """The batch's columns of these names, which must be jagged."""
    return [_of_kind(batch, name, JaggedColumn, "a list of items a row") for name in names]


def dense(batch: Batch, *names: str) -> list[Tensor]:
    """The batch's columns of these names, which must hold one value, or one row of values, a sample."""
    return [_of_kind(batch, name, Tensor, "one value a row") for name in names]


def _of_kind(batch: Batch, name: str, kind: type[Column], words: str) -> Column:
    column = batch[name]
    if not isinstance(column, kind):
        raise ValueError(f"column {name!r} must hold {words}, got {type(column).__name__}")
    return column


def append(history: JaggedColumn, items: Tensor) -> JaggedColumn:
    """`history` with one more item at the end of each row, `items` `(B,)`."""
    where = history.offsets[1:] + torch.arange(len(items))  # where each new item lands
    values = torch.empty(len(history.values) + len(items), dtype=history.values.dtype)
    old = torch.ones(len(values), dtype=torch.bool)
    old[where] = False
    values[old], values[where] = history.values, items.to(values.dtype)
    return JaggedColumn.from_lengths(values, history.lengths + 1)


def unseen_items(history: JaggedColumn, user: Tensor, counts: Tensor, num_items: int, *, salt: int) -> Tensor:
    """Random items from 1 to `num_items` that are not in the user's history, `counts` `(B,)` of them a row, int64.

    Raises:
        ValueError: A history holds nearly all items, so that no unseen one turned up.
    """
    row_of_seen = np.arange(len(user)).repeat(history.lengths.numpy())
    seen = np.unique(row_of_seen * np.int64(num_items + 1) + history.values.numpy())
    row = np.arange(len(user)).repeat(counts.numpy())
    place = np.arange(len(row)) - (np.cumsum(counts.numpy()) - counts.numpy()).repeat(counts.numpy())
    key = _mix(user.numpy().astype(np.uint64)[row] ^ _mix(np.asarray([salt], np.int64).view(np.uint64)))
    draw = np.zeros(len(row), np.int64)
    open_places = np.arange(len(row))
    attempt = 0
    while len(open_places):
        if attempt == _MOST_REDRAWS:
            raise ValueError(
                f"user {int(user[row[open_places[0]]])} has seen nearly all of the {num_items} items: no unseen one "
                f"was found in {_MOST_REDRAWS} draws; check the number of items"
            )
        fresh = _mix(
            key[open_places] + place[open_places].astype(np.uint64) * np.uint64(_MOST_REDRAWS) + np.uint64(attempt)
        )
        draw[open_places] = (fresh % np.uint64(num_items)).astype(np.int64) + 1
        hit = np.isin(row[open_places] * np.int64(num_items + 1) + draw[open_places], seen)
        open_places = open_places[hit]
        attempt += 1
    return torch.from_numpy(draw)


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """SplitMix64's finalizer: neighbouring integers give unrelated ones."""
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
