"""One column of a batch whose rows differ in length, such as user interaction histories (UIH)."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class JaggedColumn:
    """Rows of different lengths, stored back to back: row b is `values[offsets[b]:offsets[b + 1]]`."""

    values: Tensor
    """`(N, ...)`, any dtype."""
    offsets: Tensor
    """`(B + 1,)` int64, non-decreasing from 0 to N, on the device of `values`."""

    @classmethod
    def from_lengths(cls, values: Tensor, lengths: Tensor) -> "JaggedColumn":
        """A column from `lengths` `(B,)`, any integer dtype, whose sum is the number of values."""
        offsets = torch.zeros(lengths.numel() + 1, dtype=torch.int64, device=lengths.device)
        torch.cumsum(lengths, 0, out=offsets[1:])
        return cls(values, offsets)

    @property
    def lengths(self) -> Tensor:
        """`(B,)` int64: the number of values in each row."""
        return self.offsets.diff()

    def __len__(self) -> int:
        return self.offsets.numel() - 1

    def to(self, device: torch.device | str, non_blocking: bool = False) -> "JaggedColumn":
        return JaggedColumn(
            self.values.to(device, non_blocking=non_blocking), self.offsets.to(device, non_blocking=non_blocking)
        )

    def pin_memory(self) -> "JaggedColumn":
        return JaggedColumn(self.values.pin_memory(), self.offsets.pin_memory())

    def record_stream(self, stream: torch.Stream) -> None:
        self.values.record_stream(stream)
        self.offsets.record_stream(stream)


@dataclass(frozen=True, slots=True)
class NestedColumn:
    """Rows of candidates, each with content of its own length: sample → candidates → items.

    Row b's candidates are `outer_offsets[b]` to `outer_offsets[b + 1]`; candidate c's items are
    `values[inner_offsets[c]:inner_offsets[c + 1]]`.
    """

    values: Tensor
    """`(N, ...)`, any dtype: the items of all candidates of all rows."""
    inner_offsets: Tensor
    """`(C + 1,)` int64, from 0 to N, on the device of `values`."""
    outer_offsets: Tensor
    """`(B + 1,)` int64, from 0 to C, on the device of `values`."""

    def __len__(self) -> int:
        return self.outer_offsets.numel() - 1

    def to(self, device: torch.device | str, non_blocking: bool = False) -> "NestedColumn":
        return NestedColumn(*(t.to(device, non_blocking=non_blocking) for t in self._tensors()))

    def pin_memory(self) -> "NestedColumn":
        return NestedColumn(*(t.pin_memory() for t in self._tensors()))

    def record_stream(self, stream: torch.Stream) -> None:
        for t in self._tensors():
            t.record_stream(stream)

    def _tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.values, self.inner_offsets, self.outer_offsets
