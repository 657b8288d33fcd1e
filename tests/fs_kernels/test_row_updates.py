"""Optimizer steps on rows: the law that makes prioritized training exact, torch.optim's formulas, and the kernels."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import fs_kernels as k
from tests.fs_kernels.jagged import DEVICE, ON_GPU, index_dtypes, random_values

pytest.importorskip("triton", reason="needs triton: pip install 'freescale[triton]'")
pytestmark = ON_GPU

R = 40  # rows of the table
widths = st.sampled_from([1, 3, 7, 8, 16, 17, 64, 130])
dtypes = st.sampled_from([torch.float32, torch.float64, torch.float16, torch.bfloat16])
impls = pytest.mark.parametrize("impl", ["triton", "reference"])
Tables = list[Tensor]
"""Weight, two states like it, and one of a number a row."""


def tables(width: int, dtype: torch.dtype) -> Tables:
    acc = torch.float64 if dtype == torch.float64 else torch.float32
    return [
        random_values(R, (width,), dtype),
        *(random_values(R, (width,), acc).abs_() for _ in range(2)),
        random_values(R, (), acc).abs_(),
    ]


def sgd(t: Tables, rows: Tensor, grad: Tensor, impl: k.Impl) -> None:
    k.sgd_update_(t[0], rows, grad, lr=0.1, impl=impl)


def adagrad(t: Tables, rows: Tensor, grad: Tensor, impl: k.Impl) -> None:
    k.adagrad_update_(t[0], t[1], rows, grad, lr=0.1, eps=1e-8, impl=impl)


def rowwise_adagrad(t: Tables, rows: Tensor, grad: Tensor, impl: k.Impl) -> None:
    k.rowwise_adagrad_update_(t[0], t[3], rows, grad, lr=0.1, eps=1e-8, impl=impl)


def adam(t: Tables, rows: Tensor, grad: Tensor, impl: k.Impl) -> None:
    k.adam_update_(t[0], t[1], t[2], rows, grad, lr=0.1, beta1=0.9, beta2=0.999, eps=1e-8, step=3, impl=impl)


Step = Callable[[Tables, Tensor, Tensor, k.Impl], None]
steps = pytest.mark.parametrize("step", [sgd, adagrad, rowwise_adagrad, adam])


def copies(t: Tables) -> Tables:
    return [x.clone() for x in t]


@impls
@steps
@given(widths, dtypes, index_dtypes, st.integers(0, 33))
@settings(max_examples=12)
def test_updating_rows_in_two_calls_gives_the_bits_of_one(
    impl: k.Impl, step: Step, width: int, dtype: torch.dtype, index_dtype: torch.dtype, cut: int
) -> None:
    before = tables(width, dtype)
    rows, grad = torch.randperm(R, device=DEVICE)[:33].to(index_dtype), random_values(33, (width,), dtype)
    once, twice = copies(before), copies(before)
    step(once, rows, grad, impl)
    step(twice, rows[:cut], grad[:cut], impl)
    step(twice, rows[cut:], grad[cut:], impl)
    assert all(torch.equal(a, b) for a, b in zip(once, twice, strict=True))
    assert not torch.equal(once[0][rows.long()], before[0][rows.long()])
    others = torch.ones(R, dtype=torch.bool, device=DEVICE).index_fill_(0, rows.long(), False)
    assert all(torch.equal(a[others], b[others]) for a, b in zip(once, before, strict=True))


@steps
@given(widths, dtypes)
@settings(max_examples=12)
def test_the_kernel_gives_the_states_bits_and_the_weights_of_the_reference(
    step: Step, width: int, dtype: torch.dtype
) -> None:
    found = tables(width, dtype)
    expected = [x.cpu() for x in found]
    rows, grad = torch.randperm(R, device=DEVICE)[:33], random_values(33, (width,), dtype)
    step(found, rows, grad, "triton")
    step(expected, rows.cpu(), grad.cpu(), "reference")
    assert all(torch.equal(a.cpu(), b) for a, b in zip(found[1:], expected[1:], strict=True))
    # torch's root on a CPU may be off by the last bit, and Triton's interpreter cuts off where a GPU rounds.
    step_of = {torch.float32: 1e-6, torch.float64: 1e-14, torch.float16: 2**-10, torch.bfloat16: 2**-7}[dtype]
    torch.testing.assert_close(found[0].cpu(), expected[0], rtol=step_of, atol=step_of)
    if step is sgd and dtype in (torch.float32, torch.float64):
        assert torch.equal(found[0].cpu(), expected[0])


@impls
@pytest.mark.parametrize(
    ("step", "optimizer"),
    [(sgd, torch.optim.SGD), (adagrad, partial(torch.optim.Adagrad, eps=1e-8))],
    ids=["SGD", "Adagrad"],
)
def test_updates_are_those_of_torch_optim(
    impl: k.Impl, step: Step, optimizer: Callable[..., torch.optim.Optimizer]
) -> None:
    weight, state = torch.randn(R, 8, device=DEVICE, dtype=torch.float64), torch.zeros(R, 8, device=DEVICE).double()
    parameter = torch.nn.Parameter(weight.clone())
    reference = optimizer([parameter], lr=0.1)
    for _ in range(3):
        grad = torch.randn_like(weight)
        parameter.grad = grad.clone()
        reference.step()
        step([weight, state], torch.arange(R, device=DEVICE), grad, impl)
    torch.testing.assert_close(weight, parameter.detach())


@impls
def test_adam_is_that_of_torch_optim(impl: k.Impl) -> None:
    weight = torch.randn(5, 4, dtype=torch.float64, device=DEVICE)
    parameter = torch.nn.Parameter(weight.clone())
    optimizer = torch.optim.Adam([parameter], lr=0.1)
    m, v, rows = torch.zeros_like(weight), torch.zeros_like(weight), torch.arange(5, device=DEVICE)
    for step in (1, 2, 3):
        grad = torch.randn_like(weight)
        parameter.grad = grad.clone()
        optimizer.step()
        k.adam_update_(weight, m, v, rows, grad, lr=0.1, beta1=0.9, beta2=0.999, eps=1e-8, step=step, impl=impl)
    torch.testing.assert_close(weight, parameter.detach())


@impls
@steps
def test_no_rows_and_no_features_change_nothing(impl: k.Impl, step: Step) -> None:
    for width, num_rows in ((3, 0), (0, 2)):
        before = tables(width, torch.float32)
        after = copies(before)
        rows = torch.arange(num_rows, device=DEVICE)
        step(after, rows, torch.empty(num_rows, width, device=DEVICE), impl)
        assert all(torch.equal(a, b) for a, b in zip(after[:3], before[:3], strict=True))


@impls
@steps
def test_the_operation_keeps_the_dispatchers_rules(impl: k.Impl, step: Step) -> None:
    weight, m, v, state = tables(4, torch.float32)
    rows, grad = torch.tensor([3, 1], device=DEVICE), torch.randn(2, 4, device=DEVICE)
    arguments: dict[Step, tuple[object, ...]] = {
        sgd: (weight, rows, grad, 0.1, impl),
        adagrad: (weight, m, rows, grad, 0.1, 1e-8, impl),
        rowwise_adagrad: (weight, state, rows, grad, 0.1, 1e-8, impl),
        adam: (weight, m, v, rows, grad, 0.1, 0.9, 0.999, 1e-8, 3, impl),
    }
    torch.library.opcheck(getattr(torch.ops.fs_kernels, f"{step.__name__}_update_").default, arguments[step])


@impls
@steps
def test_a_graph_that_needs_the_rows_of_before_is_refused(impl: k.Impl, step: Step) -> None:
    t = tables(4, torch.float32)
    factor = torch.ones(R, 4, device=DEVICE, requires_grad=True)
    loss = (factor * t[0]).sum()
    step(t, torch.tensor([1], device=DEVICE), torch.ones(1, 4, device=DEVICE), impl)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.skipif(bool(ON_GPU), reason="values are checked on a CPU only")
@impls
@steps
@pytest.mark.parametrize("row", [R, -1])
def test_on_a_cpu_a_row_that_is_not_there_is_refused_before_others_change(impl: k.Impl, step: Step, row: int) -> None:
    num_rows, width = 5, 1 << 16  # blocks of two rows
    before = [torch.ones(R, width), torch.ones(R, width), torch.ones(R, width), torch.ones(R)]
    after = copies(before)
    with pytest.raises(IndexError, match=f"rows must be from 0 to {R - 1}, got {row}"):
        step(after, torch.tensor([0, 1, 2, 3, row]), torch.ones(num_rows, width), impl)
    assert all(torch.equal(a, b) for a, b in zip(after, before, strict=True))


def test_wrong_arguments_are_named() -> None:
    weight, rows, grad = torch.zeros(3, 4), torch.zeros(1, dtype=torch.int64), torch.zeros(1, 4)
    with pytest.raises(ValueError, match="weight must be float"):
        k.sgd_update_(weight.long(), rows, grad, lr=0.1)
    with pytest.raises(ValueError, match="grad must be float"):
        k.sgd_update_(weight, rows, grad.to(torch.complex64), lr=0.1)
    with pytest.raises(ValueError, match="one device, cpu, got grad on meta"):
        k.sgd_update_(weight, rows, grad.to("meta"), lr=0.1)
    with pytest.raises(ValueError, match="grad must be \\(1, 4\\)"):
        k.sgd_update_(weight, rows, torch.zeros(1, 3), lr=0.1)
    with pytest.raises(ValueError, match="weight must be contiguous"):
        k.sgd_update_(weight.t(), rows, torch.zeros(1, 3), lr=0.1)
    with pytest.raises(ValueError, match="the state of a \\(3, 4\\)"):
        k.adagrad_update_(weight, torch.zeros(3), rows, grad, lr=0.1, eps=1e-8)
    with pytest.raises(ValueError, match="step counts from 1"):
        k.adam_update_(weight, weight, weight, rows, grad, lr=0.1, beta1=0.9, beta2=0.9, eps=1e-8, step=0)
