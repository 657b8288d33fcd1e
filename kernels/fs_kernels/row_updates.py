"""Optimizer steps on the rows that a batch touched, in place; formulas as in FBGEMM's fused optimizers.

A row's bits do not depend on which other rows are in the call. So only additions, products, quotients and roots are
used, each rounded once: torch's fused forms (`add` with alpha, `addcmul`, `lerp`) and reductions over a row round
differently in the vectorised body of an array and in its tail.

Legend: R rows of the table, K rows to update (distinct), D features.
"""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from fs_kernels._checks import accumulator, check_rows
from fs_kernels._dispatch import Impl, torch_only

_BLOCK_NUMEL = 1 << 17


def sgd_update_(weight: Tensor, rows: Tensor, grad: Tensor, *, lr: float, impl: Impl = "auto") -> None:
    """`w -= lr · g` on `weight[rows]`; `weight` `(R, D)`, `rows` `(K,)` int64 distinct, `grad` `(K, D)`."""
    _check(weight, rows, grad, impl)
    for block, g in _blocks(rows, grad, accumulator(weight.dtype)):
        _subtract_(weight, block, lr * g)


def adagrad_update_(
    weight: Tensor, state: Tensor, rows: Tensor, grad: Tensor, *, lr: float, eps: float, impl: Impl = "auto"
) -> None:
    """`s += g²; w -= lr · g / (√s + eps)`; `state` `(R, D)`."""
    _check(weight, rows, grad, impl)
    for block, g in _blocks(rows, grad, state.dtype):
        s = state.index_select(0, block) + g * g
        state.index_copy_(0, block, s)
        _subtract_(weight, block, lr * g / (s.sqrt() + eps))


def rowwise_adagrad_update_(
    weight: Tensor, state: Tensor, rows: Tensor, grad: Tensor, *, lr: float, eps: float, impl: Impl = "auto"
) -> None:
    """`s += mean(g²) over a row; w -= lr / (√s + eps) · g`; `state` `(R,)`: one number a row."""
    _check(weight, rows, grad, impl)
    for block, g in _blocks(rows, grad, state.dtype):
        s = state.index_select(0, block) + _sum_of_rows(g * g) / g.shape[1]
        state.index_copy_(0, block, s)
        _subtract_(weight, block, (lr / (s.sqrt() + eps))[:, None] * g)


def adam_update_(
    weight: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    rows: Tensor,
    grad: Tensor,
    *,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    step: int,
    impl: Impl = "auto",
) -> None:
    """`m = β₁m + (1 - β₁)g; v = β₂v + (1 - β₂)g²; w -= lr · m̂ / (√v̂ + eps)`, bias-corrected for `step` (1, 2, …)."""
    _check(weight, rows, grad, impl)
    for block, g in _blocks(rows, grad, exp_avg.dtype):
        m = beta1 * exp_avg.index_select(0, block) + (1 - beta1) * g
        v = beta2 * exp_avg_sq.index_select(0, block) + (1 - beta2) * (g * g)
        exp_avg.index_copy_(0, block, m)
        exp_avg_sq.index_copy_(0, block, v)
        m_hat, v_hat = m / (1 - beta1**step), v / (1 - beta2**step)
        _subtract_(weight, block, lr * m_hat / (v_hat.sqrt() + eps))


def _check(weight: Tensor, rows: Tensor, grad: Tensor, impl: Impl) -> None:
    check_rows(weight, "weight")
    if rows.dtype != torch.int64 or grad.shape != (len(rows), weight.shape[1]):
        raise ValueError(
            f"rows must be (K,) int64 and grad (K, {weight.shape[1]}), got {tuple(rows.shape)} {rows.dtype} and "
            f"{tuple(grad.shape)}"
        )
    torch_only(impl, "a row update")


def _blocks(rows: Tensor, grad: Tensor, dtype: torch.dtype) -> Iterator[tuple[Tensor, Tensor]]:
    """Rows and their gradients as `dtype`; on a CPU in blocks whose temporaries stay in the cache."""
    size = max(1, _BLOCK_NUMEL // grad.shape[1]) if grad.device.type == "cpu" else max(1, len(rows))
    for block, g in zip(rows.split(size), grad.split(size), strict=True):
        yield block, g.to(dtype)


def _subtract_(weight: Tensor, rows: Tensor, change: Tensor) -> None:
    left = weight.index_select(0, rows).to(change.dtype) - change
    weight.index_copy_(0, rows, left.to(weight.dtype))


def _sum_of_rows(x: Tensor) -> Tensor:
    """`(K,)` from `(K, D)`, halves added to halves: the same order for every row, whatever the number of rows."""
    width = 1 << (x.shape[1] - 1).bit_length()
    x = F.pad(x, (0, width - x.shape[1]))
    while width > 1:
        width //= 2
        x = x[:, :width] + x[:, width:]
    return x[:, 0]
