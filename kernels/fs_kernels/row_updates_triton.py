"""Row updates in Triton: the step of a tile of rows in one pass over weight, state and gradient.

Each operation is rounded by itself, as in the reference: kernels run without fused multiply-adds, and quotients and
roots are IEEE's. What is left between the two is the last bit of torch's own root on a CPU.

Legend: R rows of the table, K rows to update (distinct), D features.
"""

import struct

import torch
import triton
import triton.language as tl
from torch import Tensor

from fs_kernels._launch import launch
from fs_kernels._rows_triton import feature_blocks, program_of, variant_of
from fs_kernels._words import dense

_TILE = 2048  # elements of a program: enough loads in flight, and few enough for the registers of Adam


@triton.jit
def _number(bits, dtype: tl.constexpr):
    """The float64 of these bits, as `dtype`: a float argument would be cut to float32."""
    return (tl.full((), 0, tl.int64) + bits).to(tl.float64, bitcast=True).to(dtype)


@triton.jit
def _quotient(x, y):
    if x.dtype == tl.float64:
        return x / y
    else:  # in float32, `/` is off by some last bits
        return tl.div_rn(x, y)


@triton.jit
def _root(x):
    if x.dtype == tl.float64:
        return tl.sqrt(x)
    else:
        return tl.sqrt_rn(x)


@triton.jit
def _tile(rows, K, D: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_D: tl.constexpr):
    """Rows of the table `(BLOCK_K,)`, places in it and in the gradient, and which are there, `(BLOCK_K, BLOCK_D)`."""
    tile, d = program_of(D, BLOCK_D)
    k = tile * BLOCK_K + tl.arange(0, BLOCK_K)  # (BLOCK_K,)
    row = tl.load(rows + k, k < K, other=0).to(tl.int64)
    return row, k, row[:, None] * D + d[None, :], k[:, None] * D + d[None, :], (k < K)[:, None] & (d < D)[None, :]


@triton.jit
def _subtract(weight, place, change, live):
    left = tl.load(weight + place, live, other=0.0).to(change.dtype) - change
    tl.store(weight + place, left.to(weight.dtype.element_ty), live)


@triton.jit(do_not_specialize=["K", "lr"])
def _sgd_kernel(
    weight, rows, grad, K: tl.int64, lr: tl.int64, D: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_D: tl.constexpr
):
    acc: tl.constexpr = tl.float64 if weight.dtype.element_ty == tl.float64 else tl.float32
    _, _, place, source, live = _tile(rows, K, D, BLOCK_K, BLOCK_D)
    g = tl.load(grad + source, live, other=0.0).to(acc)
    _subtract(weight, place, _number(lr, acc) * g, live)


@triton.jit(do_not_specialize=["K", "lr", "eps"])
def _adagrad_kernel(
    weight, state, rows, grad, K: tl.int64, lr: tl.int64, eps: tl.int64,
    D: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    acc: tl.constexpr = state.dtype.element_ty
    _, _, place, source, live = _tile(rows, K, D, BLOCK_K, BLOCK_D)
    g = tl.load(grad + source, live, other=0.0).to(acc)
    s = tl.load(state + place, live, other=1.0) + g * g
    tl.store(state + place, s, live)
    _subtract(weight, place, _quotient(_number(lr, acc) * g, _root(s) + _number(eps, acc)), live)


@triton.jit(do_not_specialize=["K", "lr", "eps", "width"])
def _rowwise_adagrad_kernel(
    weight, state, rows, grad, K: tl.int64, lr: tl.int64, eps: tl.int64, width: tl.int64,
    D: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """`width` is D as a number; a program holds whole rows."""
    acc: tl.constexpr = state.dtype.element_ty
    row, k, place, source, live = _tile(rows, K, D, BLOCK_K, BLOCK_D)
    g = tl.load(grad + source, live, other=0.0).to(acc)
    total = g * g
    for _ in tl.static_range(BLOCK_D.bit_length() - 1):  # halves added to halves: of two, so no order is left open
        total = tl.sum(tl.reshape(total, (BLOCK_K, 2, total.shape[1] // 2)), 1)
    mean = _quotient(tl.reshape(total, (BLOCK_K,)), tl.zeros((BLOCK_K,), acc) + _number(width, acc))
    s = tl.load(state + row, k < K, other=1.0) + mean
    tl.store(state + row, s, k < K)
    ones = tl.full((BLOCK_K,), 1.0, acc)
    rate = _quotient(ones, _root(s) + _number(eps, acc)) * _number(lr, acc)  # as torch rounds a number over a tensor
    _subtract(weight, place, rate[:, None] * g, live)


@triton.jit(do_not_specialize=["K", "lr", "beta1", "rest1", "beta2", "rest2", "eps", "correction1", "correction2"])
def _adam_kernel(
    weight, exp_avg, exp_avg_sq, rows, grad, K: tl.int64, lr: tl.int64, beta1: tl.int64, rest1: tl.int64,
    beta2: tl.int64, rest2: tl.int64, eps: tl.int64, correction1: tl.int64, correction2: tl.int64,
    D: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """`rest` is 1 - β, `correction` 1 - βᵗ."""
    acc: tl.constexpr = exp_avg.dtype.element_ty
    _, _, place, source, live = _tile(rows, K, D, BLOCK_K, BLOCK_D)
    g = tl.load(grad + source, live, other=0.0).to(acc)
    m = _number(beta1, acc) * tl.load(exp_avg + place, live, other=0.0) + _number(rest1, acc) * g
    v = _number(beta2, acc) * tl.load(exp_avg_sq + place, live, other=1.0) + _number(rest2, acc) * (g * g)
    tl.store(exp_avg + place, m, live)
    tl.store(exp_avg_sq + place, v, live)
    ones = tl.full((BLOCK_K, BLOCK_D), 1.0, acc)
    m_hat = _quotient(m, ones * _number(correction1, acc))
    v_hat = _quotient(v, ones * _number(correction2, acc))
    _subtract(weight, place, _quotient(_number(lr, acc) * m_hat, _root(v_hat) + _number(eps, acc)), live)


def sgd_triton(weight: Tensor, rows: Tensor, grad: Tensor, lr: float) -> None:
    _launch(_sgd_kernel, (weight,), rows, grad, (lr,))


def adagrad_triton(weight: Tensor, state: Tensor, rows: Tensor, grad: Tensor, lr: float, eps: float) -> None:
    _launch(_adagrad_kernel, (weight, state), rows, grad, (lr, eps))


def rowwise_adagrad_triton(weight: Tensor, state: Tensor, rows: Tensor, grad: Tensor, lr: float, eps: float) -> None:
    _launch(_rowwise_adagrad_kernel, (weight, state), rows, grad, (lr, eps, weight.shape[1]), whole_rows=True)


def adam_triton(
    weight: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, rows: Tensor, grad: Tensor,
    lr: float, beta1: float, beta2: float, eps: float, step: int,
) -> None:  # fmt: skip
    numbers = (lr, beta1, 1 - beta1, beta2, 1 - beta2, eps, 1 - beta1**step, 1 - beta2**step)
    _launch(_adam_kernel, (weight, exp_avg, exp_avg_sq), rows, grad, numbers)


def _launch(
    kernel: triton.JITFunction,
    tables: tuple[Tensor, ...],
    rows: Tensor,
    grad: Tensor,
    numbers: tuple[float, ...],
    *,
    whole_rows: bool = False,
) -> None:
    K, D = grad.shape
    if not grad.numel():
        return
    rows, grad = rows.contiguous(), dense(grad)
    num_d, block_d = (1, triton.next_power_of_2(D)) if whole_rows else feature_blocks(D)
    block_k = max(1, min(256, _TILE // block_d))
    args = (*tables, rows, grad)
    torch.autograd.graph.increment_version(tables)  # as torch's own in-place operations do
    launch(
        kernel, triton.cdiv(K, block_k) * num_d, (*args, K, *map(_bits_of, numbers)),
        (D, block_k, block_d), device=grad.device, variant=variant_of(*args), fuse=False,
    )  # fmt: skip


def _bits_of(number: float) -> int:
    return struct.unpack("q", struct.pack("d", number))[0]
