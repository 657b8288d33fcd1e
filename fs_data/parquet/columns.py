"""Rows of a batch's columns: cut, picked, joined and shortened; memory is shared where rows stay together."""

from collections.abc import Sequence

import torch
from torch import Tensor

from fs_data.jagged import JaggedColumn, NestedColumn

Column = Tensor | JaggedColumn | NestedColumn
"""Scalars (or arrays of one fixed shape) `(B, ...)`, lists, or lists of lists."""


def concatenate(parts: Sequence[Column]) -> Column:
    """Rows of all parts, in order; a single part is returned as it is."""
    if len(parts) == 1:
        return parts[0]
    if tensors := [p for p in parts if isinstance(p, Tensor)]:
        return torch.cat(tensors)
    if lists := [p for p in parts if isinstance(p, JaggedColumn)]:
        return JaggedColumn.from_lengths(torch.cat([c.values for c in lists]), torch.cat([c.lengths for c in lists]))
    nested = [p for p in parts if isinstance(p, NestedColumn)]
    inner = concatenate([_inner(c) for c in nested])
    counts = torch.cat([c.outer_offsets.diff() for c in nested])
    return _nest(inner, JaggedColumn.from_lengths(counts, counts).offsets)


def rows(column: Column, start: int, stop: int) -> Column:
    """Rows `start` to `stop`, sharing memory."""
    if isinstance(column, Tensor):
        return column[start:stop]
    if isinstance(column, NestedColumn):
        outer = column.outer_offsets[start : stop + 1]
        return _nest(rows(_inner(column), int(outer[0]), int(outer[-1])), outer - outer[0])
    offsets = column.offsets[start : stop + 1]
    return JaggedColumn(column.values[int(offsets[0]) : int(offsets[-1])], offsets - offsets[0])


def take(column: Column, index: Tensor) -> Column:
    """The rows `index` `(M,)`, in that order."""
    if isinstance(column, Tensor):
        return column[index]
    offsets = column.outer_offsets if isinstance(column, NestedColumn) else column.offsets
    return _gather(column, offsets[:-1][index], offsets.diff()[index])


def newest(column: Column, most: int) -> Column:
    """Each list's last `most` items (of a list of lists, its last lists); scalars pass through."""
    if isinstance(column, Tensor) or not len(column):
        return column
    offsets = column.outer_offsets if isinstance(column, NestedColumn) else column.offsets
    lengths = offsets.diff()
    if int(lengths.max()) <= most:
        return column
    kept = lengths.clamp(max=most)
    return _gather(column, offsets[1:] - kept, kept)


def _gather(column: JaggedColumn | NestedColumn, starts: Tensor, lengths: Tensor) -> Column:
    """Row b of the result is items `starts[b]` to `starts[b] + lengths[b]`."""
    offsets = JaggedColumn.from_lengths(lengths, lengths).offsets
    source = torch.arange(int(offsets[-1])) + (starts - offsets[:-1]).repeat_interleave(lengths)
    if isinstance(column, NestedColumn):
        return _nest(take(_inner(column), source), offsets)
    return JaggedColumn(column.values[source], offsets)


def _inner(column: NestedColumn) -> JaggedColumn:
    return JaggedColumn(column.values, column.inner_offsets)


def _nest(inner: Column, outer_offsets: Tensor) -> NestedColumn:
    assert isinstance(inner, JaggedColumn)
    return NestedColumn(inner.values, inner.offsets, outer_offsets)
