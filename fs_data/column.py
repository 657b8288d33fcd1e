"""Columns: what every leaf of a batch comes down to, so that one piece of code packs and joins all of them.

A column holds for each of B samples one fixed-size row (`offsets` None), or K rows of any length. K rows are stored
key-major, as TorchRec's KeyedJaggedTensor does: row (k, b) is `values[offsets[k * B + b]:offsets[k * B + b + 1]]`.

Legend: B samples, K keys, N values.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fs_kernels import jagged_permute


@dataclass(frozen=True, slots=True)
class ColumnSpec:
    """What ranks must agree on about a column, and what an empty one is made from."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    """Of one value: `values` is `(N, *shape)`."""
    num_keys: int | None
    """K; None where each sample has one row of fixed size."""

    @property
    def value_bytes(self) -> int:
        return self.dtype.itemsize * int(np.prod(self.shape, dtype=np.int64))

    def empty(self) -> "Column":
        """A column of no samples."""
        offsets = None if self.num_keys is None else np.zeros(1, np.int64)
        return Column(torch.empty(0, *self.shape, dtype=self.dtype), offsets, self.num_keys or 1)


@dataclass(frozen=True, slots=True)
class Column:
    values: Tensor
    """`(N, ...)` on any device."""
    offsets: NDArray[np.int64] | None = None
    """`(K * B + 1,)` on the host, from 0 to N; None where sample b is `values[b]`."""
    num_keys: int = 1
    """K."""

    @property
    def spec(self) -> ColumnSpec:
        keys = None if self.offsets is None else self.num_keys
        return ColumnSpec(self.values.dtype, tuple(self.values.shape[1:]), keys)

    @property
    def num_samples(self) -> int:
        return len(self.values) if self.offsets is None else (len(self.offsets) - 1) // self.num_keys

    @property
    def lengths(self) -> NDArray[np.int64]:
        """`(K, B)`: the number of values in each row."""
        if self.offsets is None:
            return np.ones((1, len(self.values)), np.int64)
        return np.diff(self.offsets).reshape(self.num_keys, -1)

    def sample_bytes(self) -> NDArray[np.int64]:
        """`(B,)`: what each sample takes on the wire, its lengths included."""
        num_bytes = self.lengths.sum(0) * self.spec.value_bytes
        return num_bytes if self.offsets is None else num_bytes + 8 * self.num_keys

    def rows(self, key: int, index: NDArray[np.int64]) -> list[slice]:
        """The slices of `values` that hold key `key` of the samples `index` `(n,)`; neighbours share one slice."""
        if not len(index):
            return []
        last = np.flatnonzero(np.diff(index) != 1)
        first_sample, last_sample = index[np.r_[0, last + 1]], index[np.r_[last, len(index) - 1]] + 1
        if self.offsets is not None:
            start = key * self.num_samples
            first_sample, last_sample = self.offsets[start + first_sample], self.offsets[start + last_sample]
        return [slice(a, b) for a, b in zip(first_sample.tolist(), last_sample.tolist(), strict=True)]


@dataclass(frozen=True, slots=True)
class Part:
    """Some samples of a column, in the order of `index`; several parts are joined into a new column."""

    column: Column
    index: NDArray[np.int64]
    """`(n,)`: samples of `column`."""

    @classmethod
    def whole(cls, column: Column) -> "Part":
        return cls(column, np.arange(column.num_samples))


def join(spec: ColumnSpec, parts: Iterable[Part], *, pin_memory: bool = False) -> Column:
    """One column of the samples of all `parts`, part after part."""
    parts = [p for p in parts if len(p.index)]
    if not parts:
        return spec.empty()
    if parts[0].column.values.is_cuda:
        values = join_by_kernel(spec, parts)
    else:
        values = join_by_slices(spec, parts, pin_memory)
    if spec.num_keys is None:
        return Column(values)
    lengths = np.concatenate([p.column.lengths[:, p.index] for p in parts], axis=1)
    return Column(values, to_offsets(lengths), spec.num_keys)


def join_by_slices(spec: ColumnSpec, parts: list[Part], pin_memory: bool = False) -> Tensor:
    """The joined values, for the host: each is copied once, neighbours together."""
    pieces = [p.column.values[s] for k in range(spec.num_keys or 1) for p in parts for s in p.column.rows(k, p.index)]
    values = torch.empty(sum(map(len, pieces)), *spec.shape, dtype=spec.dtype, pin_memory=pin_memory)
    return torch.cat(pieces, out=values)


def join_by_kernel(spec: ColumnSpec, parts: list[Part]) -> Tensor:
    """The joined values, for a device: a launch for each sample would take longer than one kernel for all."""
    values = torch.cat([p.column.values for p in parts])
    num_rows = [p.column.num_samples * p.column.num_keys for p in parts]
    first_row = np.cumsum([0, *num_rows[:-1]])
    rows = np.concatenate(
        [
            first + k * p.column.num_samples + p.index
            for k in range(spec.num_keys or 1)
            for first, p in zip(first_row.tolist(), parts, strict=True)
        ]
    )
    if spec.num_keys is None:
        return values[torch.from_numpy(rows).to(values.device)]
    lengths = np.concatenate([p.column.lengths.ravel() for p in parts])
    offsets, index = (torch.from_numpy(x).to(values.device) for x in (to_offsets(lengths), rows))
    return jagged_permute(values, offsets, index, out_size=int(lengths[rows].sum()))[0]


def to_offsets(lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    """`(n + 1,)` int64 from 0 to the sum, for `lengths` with n elements of any shape."""
    offsets = np.zeros(lengths.size + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return offsets
