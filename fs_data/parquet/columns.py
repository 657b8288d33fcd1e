"""Arrow columns as tensors, without copies where memory allows; nulls and foreign types are errors with their place."""

from collections.abc import Sequence
from typing import Any

import pyarrow as pa
import torch
from torch import Tensor

from fs_data.jagged import JaggedColumn
from fs_data.parquet.errors import ParquetError

Column = Tensor | JaggedColumn


def to_column(chunked: Any, name: str, place: str) -> Column:
    """A list column as `JaggedColumn`, a scalar one as `(B,)`.

    Args:
        chunked: `pa.ChunkedArray`.
        place: File and row group, for errors.
    """
    kind = chunked.type
    is_list = pa.types.is_list(kind) or pa.types.is_large_list(kind)
    item = kind.value_type if is_list else kind
    if not (pa.types.is_integer(item) or pa.types.is_floating(item) or pa.types.is_boolean(item)):
        raise ParquetError(
            f"{place}, column {name!r}: must hold integers, floats or booleans, or lists of them, got {kind}; leave it "
            "out by columns=[…]"
        )
    first = 0
    parts: list[Column] = []
    for chunk in chunked.chunks or [pa.array([], kind)]:
        if chunk.null_count:
            row = first + int(chunk.is_null().to_numpy(zero_copy_only=False).argmax())
            raise ParquetError(
                f"{place}, column {name!r}, row {row}: must not be null; write an empty list, or drop the row"
            )
        parts.append(_list_column(chunk, name, place, first) if is_list else _tensor(chunk))
        first += len(chunk)
    return concatenate(parts)


def _list_column(chunk: Any, name: str, place: str, first: int) -> JaggedColumn:
    offsets = torch.from_dlpack(chunk.offsets).long()  # respects slices, unlike values
    start, stop = int(offsets[0]), int(offsets[-1])
    values = chunk.values.slice(start, stop - start)
    if values.null_count:
        at = start + int(values.is_null().to_numpy(zero_copy_only=False).argmax())
        row = first + int(torch.searchsorted(offsets, at, right=True)) - 1
        raise ParquetError(f"{place}, column {name!r}, row {row}: must not hold a null element; drop or replace it")
    return JaggedColumn(_tensor(values), offsets - start)


def _tensor(array: Any) -> Tensor:
    if pa.types.is_boolean(array.type):  # bits, which tensors cannot share
        return torch.from_numpy(array.to_numpy(zero_copy_only=False))
    return torch.from_dlpack(array)


def concatenate(parts: Sequence[Column]) -> Column:
    """Rows of all parts, in order; a single part is returned as it is."""
    if len(parts) == 1:
        return parts[0]
    tensors = [p for p in parts if isinstance(p, Tensor)]
    if tensors:
        return torch.cat(tensors)
    columns = [p for p in parts if isinstance(p, JaggedColumn)]
    return JaggedColumn.from_lengths(torch.cat([c.values for c in columns]), torch.cat([c.lengths for c in columns]))


def rows(column: Column, start: int, stop: int) -> Column:
    """Rows `start` to `stop`, sharing memory."""
    if isinstance(column, Tensor):
        return column[start:stop]
    offsets = column.offsets[start : stop + 1]
    return JaggedColumn(column.values[int(offsets[0]) : int(offsets[-1])], offsets - offsets[0])


def take(column: Column, index: Tensor) -> Column:
    """The rows `index` `(M,)`, in that order."""
    if isinstance(column, Tensor):
        return column[index]
    return _gather(column, column.offsets[:-1][index], column.lengths[index])


def newest(column: Column, most: int) -> Column:
    """Each history's last `most` items; scalars pass through."""
    if isinstance(column, Tensor) or not len(column) or int(column.lengths.max()) <= most:
        return column
    kept = column.lengths.clamp(max=most)
    return _gather(column, column.offsets[1:] - kept, kept)


def _gather(column: JaggedColumn, starts: Tensor, lengths: Tensor) -> JaggedColumn:
    out = JaggedColumn.from_lengths(column.values[:0], lengths)
    source = torch.arange(int(out.offsets[-1])) + (starts - out.offsets[:-1]).repeat_interleave(lengths)
    return JaggedColumn(column.values[source], out.offsets)
