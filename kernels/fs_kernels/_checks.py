"""Checks of arguments that cost nothing: shapes and dtypes, never values on a device."""

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


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """What sums and updates are computed in: float64 for float64, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32
