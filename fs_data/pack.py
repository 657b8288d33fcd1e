"""Samples to bytes and back: one block for each peer.

A block holds for every column the lengths of its rows, and then for every column its values, each section aligned to 16
bytes. The receiver knows a block's size from the samples' bytes alone, so sizes never travel.
"""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fs_data.column import Column, ColumnSpec, to_offsets

_ALIGNMENT = 16


def block_bytes(num_columns: int, sample_bytes: NDArray[np.int64]) -> int:
    """The size of a block of samples that take `sample_bytes` `(n,)` each; an empty block takes nothing."""
    if not len(sample_bytes):
        return 0
    # Aligning the lengths and the values of each column wastes less than 16 bytes apiece.
    return _align(int(sample_bytes.sum()) + 2 * num_columns * _ALIGNMENT)


def pack(columns: Sequence[Column], index: NDArray[np.int64], block: Tensor) -> None:
    """Writes the samples `index` `(n,)` of `columns` into `block`, uint8 of `block_bytes`."""
    if not len(index):
        return
    start = 0
    for column in columns:
        if column.offsets is not None:
            lengths = torch.from_numpy(column.lengths[:, index].ravel()).view(torch.uint8)
            block[start : start + len(lengths)] = lengths
            start = _align(start + len(lengths))
    for column in columns:
        pieces = [as_bytes(column.values[rows]) for k in range(column.num_keys) for rows in column.rows(k, index)]
        end = start + sum(map(len, pieces))
        torch.cat(pieces, out=block[start:end])
        start = _align(end)


def unpack(specs: Sequence[ColumnSpec], num_samples: int, block: Tensor) -> list[Column]:
    """The columns of the `num_samples` samples in `block`, as views of it."""
    if not num_samples:
        return [spec.empty() for spec in specs]
    end = 0
    lengths: list[NDArray[np.int64]] = []
    for spec in specs:
        start, end = end, end + 8 * (spec.num_keys or 0) * num_samples
        lengths.append(block[start:end].view(torch.int64).numpy())
        end = _align(end)
    columns: list[Column] = []
    for spec, row_lengths in zip(specs, lengths, strict=True):
        num_values = num_samples if spec.num_keys is None else int(row_lengths.sum())
        start = _align(end)
        end = start + num_values * spec.value_bytes
        values = block[start:end].view(spec.dtype).view(num_values, *spec.shape)
        offsets = None if spec.num_keys is None else to_offsets(row_lengths)
        columns.append(Column(values, offsets, spec.num_keys or 1))
    return columns


def as_bytes(x: Tensor) -> Tensor:
    """`x` as flat uint8; a view where `x` is contiguous."""
    x = x.contiguous()
    # A single element may have any stride, and only a stride of 1 can be seen as bytes.
    return x.as_strided((x.numel(),), (1,)).view(torch.uint8) if x.numel() else x.new_empty(0, dtype=torch.uint8)


def _align(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
