"""Checks of arguments that cost little: shapes, dtypes and devices, and values on a CPU, never those on a device."""

import torch
from torch import Tensor


def check_offsets(offsets: Tensor, name: str = "offsets") -> None:
    if offsets.dtype != torch.int64 or offsets.dim() != 1 or not len(offsets):
        raise ValueError(f"{name} must be (B + 1,) int64, got {tuple(offsets.shape)} {offsets.dtype}")


def check_index(index: Tensor, name: str = "index") -> None:
    if index.dtype not in (torch.int32, torch.int64) or index.dim() != 1:
        raise ValueError(f"{name} must be one-dimensional int32 or int64, got {tuple(index.shape)} {index.dtype}")


def check_rows(x: Tensor, name: str) -> None:
    if x.dim() != 2:
        raise ValueError(f"{name} must be (N, D), got {tuple(x.shape)}")


def check_values(x: Tensor, name: str = "values") -> None:
    if not x.dim():
        raise ValueError(f"{name} must be (N, ...), got a single number")


def check_float(x: Tensor, name: str) -> None:
    if not x.is_floating_point():
        raise ValueError(f"{name} must be float, got {x.dtype}")


def check_devices(x: Tensor, **others: Tensor | None) -> None:
    """That `others` are where `x` is: a kernel would take addresses on one device for those on another."""
    for name, other in others.items():
        if other is not None and other.device != x.device:
            raise ValueError(f"all must be on one device, {x.device}, got {name} on {other.device}")


# What follows is called by the operations themselves, since only there tensors are sure to have data.


def check_ends(offsets: Tensor, stop: int, name: str = "offsets", *, whole: bool = True) -> None:
    """That offsets do not decrease from 0 to `stop`, or are within it where they need not be `whole`.

    torch's `repeat_interleave` writes past its output where one decreases.
    """
    if not offsets.is_cpu:
        return
    first, last = int(offsets[0]), int(offsets[-1])
    if (first or last != stop) if whole else (first < 0 or last > stop):
        raise ValueError(f"{name} must be {'from' if whole else 'within'} 0 to {stop}, got {first} to {last}")
    if bool((offsets[1:] < offsets[:-1]).any()):
        raise ValueError(f"{name} must not decrease, got {int(offsets.diff().min())} from one to the next")


def check_bounds(index: Tensor, first: int, stop: int, name: str = "index") -> None:
    """That all are from `first` to `stop - 1`."""
    if not index.is_cpu or not index.numel():
        return
    least, most = (int(x) for x in torch.aminmax(index))
    if least < first or most >= stop:
        raise IndexError(f"{name} must be from {first} to {stop - 1}, got {least if least < first else most}")


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """What sums and updates are computed in: float64 for float64, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32
