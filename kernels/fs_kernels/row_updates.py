"""Optimizer steps on the rows that a batch touched, in place; formulas as in FBGEMM's fused optimizers.

A row's bits do not depend on which other rows are in the call. So only additions, products, quotients and roots are
used, each rounded once: torch's fused forms (`add` with alpha, `addcmul`, `lerp`) and reductions over a row round
differently in the vectorised body of an array and in its tail.

Legend: R rows of the table, K rows to update (distinct), D features.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from fs_kernels._checks import accumulator, check_rows
from fs_kernels._dispatch import Impl, torch_only


def sgd_update_(weight: Tensor, rows: Tensor, grad: Tensor, *, lr: float, impl: Impl = "auto") -> None:
    """`w -= lr · g` on `weight[rows]`; `weight` `(R, D)`, `rows` `(K,)` int64 distinct, `grad` `(K, D)`."""
    _check(weight, rows, grad, impl)
    g = grad.to(accumulator(weight.dtype))
    _subtract_(weight, rows, lr * g)


def adagrad_update_(
    weight: Tensor, state: Tensor, rows: Tensor, grad: Tensor, *, lr: float, eps: float, impl: Impl = "auto"
) -> None:
    """`s += g²; w -= lr · g / (√s + eps)`; `state` `(R, D)`."""
    _check(weight, rows, grad, impl)
    g = grad.to(state.dtype)
    s = state[rows] + g * g
    state[rows] = s
    _subtract_(weight, rows, lr * g / (s.sqrt() + eps))


def rowwise_adagrad_update_(
    weight: Tensor, state: Tensor, rows: Tensor, grad: Tensor, *, lr: float, eps: float, impl: Impl = "auto"
) -> None:
    """`s += mean(g²) over a row; w -= lr / (√s + eps) · g`; `state` `(R,)`: one number a row."""
    _check(weight, rows, grad, impl)
    g = grad.to(state.dtype)
    s = state[rows] + _sum_of_rows(g * g) / g.shape[1]
    state[rows] = s
    _subtract_(weight, rows, (lr / (s.sqrt() + eps))[:, None] * g)


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
    g = grad.to(exp_avg.dtype)
    m = beta1 * exp_avg[rows] + (1 - beta1) * g
    v = beta2 * exp_avg_sq[rows] + (1 - beta2) * (g * g)
    exp_avg[rows], exp_avg_sq[rows] = m, v
    m_hat, v_hat = m / (1 - beta1**step), v / (1 - beta2**step)
    _subtract_(weight, rows, lr * m_hat / (v_hat.sqrt() + eps))


def _check(weight: Tensor, rows: Tensor, grad: Tensor, impl: Impl) -> None:
    check_rows(weight, "weight")
    if rows.dtype != torch.int64 or grad.shape != (len(rows), weight.shape[1]):
        raise ValueError(
            f"rows must be (K,) int64 and grad (K, {weight.shape[1]}), got {tuple(rows.shape)} {rows.dtype} and "
            f"{tuple(grad.shape)}"
        )
    torch_only(impl, "a row update")


def _subtract_(weight: Tensor, rows: Tensor, change: Tensor) -> None:
    weight[rows] = (weight[rows].to(change.dtype) - change).to(weight.dtype)


def _sum_of_rows(x: Tensor) -> Tensor:
    """`(K,)` from `(K, D)`, halves added to halves: the same order for every row, whatever the number of rows."""
    width = 1 << (x.shape[1] - 1).bit_length()
    x = F.pad(x, (0, width - x.shape[1]))
    while width > 1:
        width //= 2
        x = x[:, :width] + x[:, width:]
    return x[:, 0]
