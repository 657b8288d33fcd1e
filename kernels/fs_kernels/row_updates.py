"""Optimizer steps on the rows that a batch touched, in place; formulas as in FBGEMM's fused optimizers.

A row's bits do not depend on which other rows are in the call. So only additions, products, quotients and roots are
used, each rounded once: torch's fused forms (`add` with alpha, `addcmul`, `lerp`) and reductions over a row round
differently in the vectorised body of an array and in its tail.

Legend: R rows of the table, K rows to update (distinct), D features.
"""

from collections.abc import Iterator
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from fs_kernels._checks import accumulator, check_bounds, check_devices, check_float, check_index, check_rows
from fs_kernels._dispatch import Impl, resolve_impl
from fs_kernels._library import register

_BLOCK_NUMEL = 1 << 17


def sgd_update_(weight: Tensor, rows: Tensor, grad: Tensor, *, lr: float, impl: Impl = "auto") -> None:
    """`w -= lr · g` on `weight[rows]`.

    Args:
        weight: `(R, D)` float, contiguous.
        rows: `(K,)` int32 or int64, distinct.
        grad: `(K, D)` float.
    """
    _check(weight, rows, grad)
    _sgd(weight, rows, grad, lr, impl)


def adagrad_update_(
    weight: Tensor, state: Tensor, rows: Tensor, grad: Tensor, *, lr: float, eps: float, impl: Impl = "auto"
) -> None:
    """`s += g²; w -= lr · g / (√s + eps)`; `state` `(R, D)` float32, or float64 as the weight."""
    _check(weight, rows, grad)
    _check_state(weight, state, weight.shape)
    _adagrad(weight, state, rows, grad, lr, eps, impl)


def rowwise_adagrad_update_(
    weight: Tensor, state: Tensor, rows: Tensor, grad: Tensor, *, lr: float, eps: float, impl: Impl = "auto"
) -> None:
    """`s += mean(g²) over a row; w -= lr / (√s + eps) · g`; `state` `(R,)`: one number a row."""
    _check(weight, rows, grad)
    _check_state(weight, state, weight.shape[:1])
    _rowwise_adagrad(weight, state, rows, grad, lr, eps, impl)


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
    _check(weight, rows, grad)
    _check_state(weight, exp_avg, weight.shape)
    _check_state(weight, exp_avg_sq, weight.shape)
    if step < 1:
        raise ValueError(f"step counts from 1, got {step}")
    _adam(weight, exp_avg, exp_avg_sq, rows, grad, lr, beta1, beta2, eps, step, impl)


def _check(weight: Tensor, rows: Tensor, grad: Tensor) -> None:
    check_rows(weight, "weight")
    check_float(weight, "weight")
    check_index(rows, "rows")
    check_float(grad, "grad")
    check_devices(weight, rows=rows, grad=grad)
    if not weight.is_contiguous():
        raise ValueError(f"weight must be contiguous, got strides {weight.stride()} for {tuple(weight.shape)}")
    if grad.shape != (rows.shape[0], weight.shape[1]):
        raise ValueError(
            f"grad must be ({rows.shape[0]}, {weight.shape[1]}) for so many rows of this weight, got "
            f"{tuple(grad.shape)}"
        )


def _check_state(weight: Tensor, state: Tensor, shape: torch.Size) -> None:
    check_devices(weight, state=state)
    if state.shape != shape or state.dtype != accumulator(weight.dtype) or not state.is_contiguous():
        raise ValueError(
            f"the state of a {tuple(weight.shape)} {weight.dtype} weight must be contiguous {tuple(shape)} "
            f"{accumulator(weight.dtype)}, got {tuple(state.shape)} {state.dtype} with strides {state.stride()}"
        )


def _resolve(impl: Impl, weight: Tensor, rows: Tensor) -> Literal["triton", "reference"]:
    check_bounds(rows, 0, weight.shape[0], "rows")  # before a row is changed
    return resolve_impl(impl, weight)


def _run_sgd(weight: Tensor, rows: Tensor, grad: Tensor, lr: float, impl: Impl) -> None:
    if _resolve(impl, weight, rows) == "triton":
        from fs_kernels.row_updates_triton import sgd_triton

        return sgd_triton(weight, rows, grad, lr)
    for block, g in _blocks(weight, rows, grad):
        _subtract_(weight, block, lr * g)


def _run_adagrad(weight: Tensor, state: Tensor, rows: Tensor, grad: Tensor, lr: float, eps: float, impl: Impl) -> None:
    if _resolve(impl, weight, rows) == "triton":
        from fs_kernels.row_updates_triton import adagrad_triton

        return adagrad_triton(weight, state, rows, grad, lr, eps)
    for block, g in _blocks(weight, rows, grad):
        s = state.index_select(0, block) + g * g
        state.index_copy_(0, block, s)
        _subtract_(weight, block, lr * g / (s.sqrt() + eps))


def _run_rowwise_adagrad(
    weight: Tensor, state: Tensor, rows: Tensor, grad: Tensor, lr: float, eps: float, impl: Impl
) -> None:
    if _resolve(impl, weight, rows) == "triton":
        from fs_kernels.row_updates_triton import rowwise_adagrad_triton

        return rowwise_adagrad_triton(weight, state, rows, grad, lr, eps)
    for block, g in _blocks(weight, rows, grad):
        s = state.index_select(0, block) + _sum_of_rows(g * g) / g.shape[1]
        state.index_copy_(0, block, s)
        _subtract_(weight, block, (lr / (s.sqrt() + eps))[:, None] * g)


def _run_adam(
    weight: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    rows: Tensor,
    grad: Tensor,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    step: int,
    impl: Impl,
) -> None:
    if _resolve(impl, weight, rows) == "triton":
        from fs_kernels.row_updates_triton import adam_triton

        return adam_triton(weight, exp_avg, exp_avg_sq, rows, grad, lr, beta1, beta2, eps, step)
    for block, g in _blocks(weight, rows, grad):
        m = beta1 * exp_avg.index_select(0, block) + (1 - beta1) * g
        v = beta2 * exp_avg_sq.index_select(0, block) + (1 - beta2) * (g * g)
        exp_avg.index_copy_(0, block, m)
        exp_avg_sq.index_copy_(0, block, v)
        m_hat, v_hat = m / (1 - beta1**step), v / (1 - beta2**step)
        _subtract_(weight, block, lr * m_hat / (v_hat.sqrt() + eps))


def _blocks(weight: Tensor, rows: Tensor, grad: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Rows and their gradients as accumulators; on a CPU in blocks whose temporaries stay in the cache."""
    if not grad.numel():
        return
    size = max(1, _BLOCK_NUMEL // grad.shape[1]) if grad.device.type == "cpu" else len(rows)
    for block, g in zip(rows.split(size), grad.split(size), strict=True):
        yield block.long(), g.to(accumulator(weight.dtype))


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


def _fake(*_: object) -> None:
    """What an update gives back."""


_sgd = register(
    "sgd_update_(Tensor(a!) weight, Tensor rows, Tensor grad, float lr, str impl) -> ()", _run_sgd, fake=_fake
)
_adagrad = register(
    "adagrad_update_(Tensor(a!) weight, Tensor(b!) state, Tensor rows, Tensor grad, float lr, float eps, str impl)"
    " -> ()",
    _run_adagrad,
    fake=_fake,
)
_rowwise_adagrad = register(
    "rowwise_adagrad_update_(Tensor(a!) weight, Tensor(b!) state, Tensor rows, Tensor grad, float lr, float eps,"
    " str impl) -> ()",
    _run_rowwise_adagrad,
    fake=_fake,
)
_adam = register(
    "adam_update_(Tensor(a!) weight, Tensor(b!) exp_avg, Tensor(c!) exp_avg_sq, Tensor rows, Tensor grad, float lr,"
    " float beta1, float beta2, float eps, int step, str impl) -> ()",
    _run_adam,
    fake=_fake,
)
