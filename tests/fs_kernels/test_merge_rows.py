"""Rows out of two sources, by the reference and by the kernel, compiled where there is a GPU, else interpreted."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fs_kernels as k
from tests.fs_kernels.jagged import DEVICE, ON_GPU, dtypes, index_dtypes, random_values

pytest.importorskip("triton", reason="needs triton: pip install 'freescale[triton]'")
pytestmark = ON_GPU

impls = pytest.mark.parametrize("impl", ["triton", "reference"])
widths = st.sampled_from([1, 3, 16, 130])
sources = st.lists(st.integers(-3, 4), max_size=300)


@impls
@given(sources, widths, dtypes, index_dtypes)
@settings(max_examples=20)
def test_each_row_comes_from_its_source(
    impl: k.Impl, source: list[int], width: int, dtype: torch.dtype, index_dtype: torch.dtype
) -> None:
    first, second = random_values(5, (width,), dtype), random_values(3, (width,), dtype)
    out = k.merge_rows(first, second, torch.tensor(source, dtype=index_dtype, device=DEVICE), impl=impl)
    expected = [first[n] if n >= 0 else second[~n] for n in source]
    assert torch.equal(out, torch.stack([first[0], *expected])[1:])


@impls
@given(sources, widths)
@settings(max_examples=8)
def test_gradients_go_back_to_the_source_and_add_up(impl: k.Impl, source: list[int], width: int) -> None:
    first, second = (random_values(n, (width,), torch.float32).requires_grad_() for n in (5, 3))
    weight = random_values(len(source), (width,), torch.float32)
    out = k.merge_rows(first, second, torch.tensor(source, dtype=torch.int64, device=DEVICE), impl=impl)
    found = torch.autograd.grad((out * weight).sum(), (first, second))
    expected = torch.zeros(8, width, dtype=torch.float64, device=DEVICE)
    for n, row in zip(source, weight, strict=True):
        expected[n if n >= 0 else 5 + ~n] += row
    torch.testing.assert_close(torch.cat(found).double(), expected, rtol=1e-5, atol=1e-3)


@impls
def test_an_empty_source_may_be_left_out(impl: k.Impl) -> None:
    nothing, rows = torch.empty(0, 4, device=DEVICE), torch.randn(3, 4, device=DEVICE)
    order = torch.tensor([2, 0], device=DEVICE)
    assert torch.equal(k.merge_rows(rows, nothing, order, impl=impl), rows[[2, 0]])
    assert torch.equal(k.merge_rows(nothing, rows, ~order, impl=impl), rows[[2, 0]])
    assert k.merge_rows(nothing, nothing, order[:0], impl=impl).shape == (0, 4)


@impls
def test_the_operation_keeps_the_dispatchers_rules(impl: k.Impl) -> None:
    first, second = (torch.randn(n, 4, device=DEVICE, requires_grad=True) for n in (3, 2))
    source = torch.tensor([2, ~1, 0, 2, ~0], device=DEVICE)
    torch.library.opcheck(torch.ops.fs_kernels.merge_rows.default, (first, second, source, impl))


@pytest.mark.skipif(not ON_GPU, reason="needs a CUDA device: torch.cuda.is_available() is False")
def test_rows_beyond_2_to_the_31_elements_are_reached() -> None:
    num_rows = (1 << 24) + 2  # of 128 elements
    second = torch.zeros(num_rows, 128, dtype=torch.uint8, device=DEVICE)
    second[-1], second[0] = 7, 3
    out = k.merge_rows(second, second, torch.full((num_rows,), ~(num_rows - 1), device=DEVICE), impl="triton")
    assert bool((out[-1] == 7).all())
    assert bool((out[0] == 7).all())


@pytest.mark.skipif(bool(ON_GPU), reason="values are checked on a CPU only")
@impls
@pytest.mark.parametrize("row", [2, -4])
def test_on_a_cpu_rows_that_are_not_there_are_refused(impl: k.Impl, row: int) -> None:
    with pytest.raises(IndexError, match=f"source must be from -3 to 1, got {row}"):
        k.merge_rows(torch.zeros(2, 3), torch.zeros(3, 3), torch.tensor([0, row]), impl=impl)


def test_wrong_arguments_are_named() -> None:
    rows, source = torch.zeros(2, 3), torch.tensor([0])
    with pytest.raises(ValueError, match="one device, cpu, got second on meta"):
        k.merge_rows(rows, rows.to("meta"), source)
    with pytest.raises(ValueError, match="agree in width and dtype"):
        k.merge_rows(rows, rows.double(), source)
    with pytest.raises(ValueError, match="source must be"):
        k.merge_rows(rows, rows, source.float())
