"""This rank's batch as an exchange sees it: columns to take samples from, and the numbers that all ranks get to know.

Legend: B samples of this rank, T tasks with loss weights.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fs_data.column import Column, Part, join
from fs_data.errors import LoaderError
from fs_data.schema import BoundSchema, Split
from fs_data.shuffle_plan import Features
from fs_data.tree import Tree, walk

Ints = NDArray[np.int64]

_TOO_LONG = 1 << 31  # its square still fits


class RowField(IntEnum):
    """Where each number of a sample stands; after these, a float64's bits for each task's loss weight."""

    TOKENS = 0
    CANDIDATES = 1
    BYTES = 2
    GROUP = 3
    AGE = 4
    """Steps that the sample has waited for."""


@dataclass(frozen=True, kw_only=True)
class Measures:
    """What a user asks of a batch beyond its schema."""

    length: Callable[[Any], Any] | None = None
    """`(B,)` lengths of a batch's samples; None takes the longest jagged row of each."""
    weights: Mapping[str, Callable[[Any], Any]] = field(default_factory=dict[str, Callable[[Any], Any]])
    """For each task, `(B,)` loss weights of a batch's samples."""

    @property
    def width(self) -> int:
        """Numbers of a sample: 5 + T."""
        return len(RowField) + len(self.weights)


def row_lengths(path: str) -> Callable[[Any], Any]:
    """A `Measures.length`: the row lengths of the batch's leaf at `path`."""

    def lengths(batch: Any) -> Any:
        leaves: dict[str, Any] = dict(walk(batch))
        if path not in leaves or not hasattr(leaves[path], "lengths"):
            raise LoaderError(f"length must name a leaf that has lengths, got '{path}'; the batch has {list(leaves)}")
        found = leaves[path].lengths
        return found() if callable(found) else found  # TorchRec's are methods

    return lengths


@dataclass(frozen=True)
class Local:
    """Samples on this rank, before the exchange."""

    rows: Ints
    """`(B, 5 + T)`."""
    columns: list[Column] | None = None
    """None where the rank has no samples."""
    content_lengths: Ints = field(default_factory=lambda: np.zeros(0, np.int64))
    """`(C,)`: of all candidates."""
    tree: Tree | None = None
    """What stays on the rank."""
    is_batch: bool = False
    """Whether these are exactly the samples of the batch that the loader gave, in order."""
    error: BaseException | None = None

    def keep(self, index: Ints) -> "Held | None":
        """The samples `index` `(n,)`, copied, to come before the next batch."""
        if not len(index) or self.columns is None:
            return None
        rows = self.rows[index]
        rows[:, RowField.AGE] += 1
        ends = np.cumsum(self.rows[:, RowField.CANDIDATES])
        starts = ends - self.rows[:, RowField.CANDIDATES]
        lengths = [self.content_lengths[starts[i] : ends[i]] for i in index.tolist()]
        return Held([join(c.spec, [Part(c, index)]) for c in self.columns], rows, np.concatenate(lengths))


@dataclass(frozen=True)
class Held:
    """Samples that wait on this rank for a later step."""

    columns: list[Column]
    rows: Ints
    content_lengths: Ints

    def before(self, local: Local) -> Local:
        """These samples in front of those of `local`."""
        both = [self.columns] + ([local.columns] if local.columns else [])
        columns = [join(parts[0].spec, [Part.whole(c) for c in parts]) for parts in zip(*both, strict=True)]
        rows = np.concatenate([self.rows, local.rows])
        return Local(rows, columns, np.concatenate([self.content_lengths, local.content_lengths]), local.tree)

    def state_dict(self) -> dict[str, Any]:
        columns: list[dict[str, Any]] = []
        for c in self.columns:
            offsets = None if c.offsets is None else torch.from_numpy(c.offsets)
            columns.append({"values": c.values, "offsets": offsets, "keys": c.num_keys})
        numbers = {"rows": torch.from_numpy(self.rows), "content_lengths": torch.from_numpy(self.content_lengths)}
        return {"columns": columns} | numbers

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> "Held":
        columns: list[Column] = []
        for c in state["columns"]:
            offsets = None if c["offsets"] is None else c["offsets"].numpy()
            columns.append(Column(c["values"], offsets, c["keys"]))
        return cls(columns, state["rows"].numpy(), state["content_lengths"].numpy())


def prepare(batch: Any, schema: BoundSchema, measures: Measures) -> Local:
    """`batch` taken apart and measured; raises where it does not fit its schema or a function of the user's fails."""
    split = schema.split(batch)
    rows = np.zeros((split.num_samples, measures.width), np.int64)
    candidates, content_lengths = schema.candidates(split)
    rows[:, RowField.TOKENS] = _lengths(batch, split, schema, measures)
    rows[:, RowField.CANDIDATES] = candidates
    rows[:, RowField.BYTES] = sum(c.sample_bytes() for c in split.columns)
    rows[:, RowField.GROUP] = schema.group_keys(batch, split)
    for column, (task, fn) in enumerate(measures.weights.items(), start=len(RowField)):
        weight = _per_sample(fn(batch), split.num_samples, f"weights['{task}']", np.float64)
        if not np.isfinite(weight).all() or (weight < 0).any():
            raise LoaderError(f"weights['{task}'] must be finite and at least 0, got {weight.min()} to {weight.max()}")
        rows[:, column] = weight.view(np.int64)
    return Local(rows, split.columns, content_lengths, split.tree, is_batch=True)


def features_of(rows: Sequence[Ints], content: Ints, *, has_groups: bool) -> Features:
    """What a plan is made from.

    Args:
        rows: `(B, 5 + T)` of each rank.
        content: `(2, N)` of `sums_of_candidates`, rank after rank.
        has_groups: Whether samples have groups.
    """
    everyone = np.concatenate(rows)
    return Features(
        rank=np.repeat(np.arange(len(rows)), [len(r) for r in rows]),
        num_tokens=everyone[:, RowField.TOKENS],
        num_candidates=everyone[:, RowField.CANDIDATES],
        content_sum=content[0],
        content_sum_of_squares=content[1],
        num_bytes=everyone[:, RowField.BYTES],
        group=everyone[:, RowField.GROUP] if has_groups else None,
        age=everyone[:, RowField.AGE],
    )


def sums_of_candidates(lengths: Ints, counts: Ints) -> Ints:
    """`(2, B)`: sums of content lengths and of their squares over each sample's candidates, `counts` `(B,)` in all."""
    ends = np.cumsum(counts)
    totals = np.stack([np.r_[0, np.cumsum(x)] for x in (lengths, lengths**2)])
    return totals[:, ends] - totals[:, ends - counts]


def weights_of(rows: Ints, task_index: int) -> NDArray[np.float64]:
    """`(B,)`: the loss weights of one task."""
    return np.ascontiguousarray(rows[:, len(RowField) + task_index]).view(np.float64)


def _lengths(batch: Any, split: Split, schema: BoundSchema, measures: Measures) -> Ints:
    if measures.length is None:
        return schema.history_lengths(split)
    lengths = _per_sample(measures.length(batch), split.num_samples, "length", np.int64)
    if (lengths < 0).any() or (lengths >= _TOO_LONG).any():
        raise LoaderError(f"length must be at least 0 and less than 2^31, got {lengths.min()} to {lengths.max()}")
    return lengths


def _per_sample(value: Any, num_samples: int, name: str, dtype: Any) -> NDArray[Any]:
    if isinstance(value, Tensor):
        value = value.detach().cpu()
        value = value.double() if value.is_floating_point() else value  # numpy has no bfloat16
    array = np.asarray(value)
    if array.shape != (num_samples,):
        raise LoaderError(f"{name} must give one number a sample, so shape ({num_samples},), got {array.shape}")
    if dtype is np.int64 and np.issubdtype(array.dtype, np.floating) and not (array == np.floor(array)).all():
        raise LoaderError(f"{name} must give whole numbers, got {array[array != np.floor(array)][0]}; round them")
    return array.astype(dtype)
