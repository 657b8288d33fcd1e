"""Rows in another order, by the reference and by the kernel, compiled where there is a GPU, else interpreted."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fs_kernels as k
from tests.fs_kernels.jagged import (
    DEVICE,
    ON_GPU,
    dtypes,
    index_dtypes,
    inner_shapes,
    lengths,
    offsets_of,
    random_values,
    rows_of,
)

pytest.importorskip("triton", reason="needs triton: pip install 'freescale[triton]'")
pytestmark = ON_GPU

impls = pytest.mark.parametrize("impl", ["triton", "reference"])


@impls
@given(lengths, inner_shapes, dtypes, index_dtypes, st.booleans(), st.data())
@settings(max_examples=80)
def test_permuting_rows_is_permuting_lists(
    impl: k.Impl, lengths: list[int], inner: tuple[int, ...], dtype: torch.dtype, index_dtype: torch.dtype,
    knows_size: bool, data: st.DataObject,
) -> None:  # fmt: skip
    offsets, values = offsets_of(lengths), random_values(sum(lengths), inner, dtype)
    index = data.draw(st.lists(st.integers(0, len(lengths) - 1), max_size=6))
    out_size = sum(lengths[i] for i in index) if knows_size else None
    rows = rows_of(values, offsets)
    expected = torch.cat([values[:0], *(rows[i] for i in index)])
    out, out_offsets = k.jagged_permute(
        values, offsets, torch.tensor(index, dtype=index_dtype, device=DEVICE), out_size=out_size, impl=impl
    )
    assert torch.equal(out, expected)
    assert torch.equal(out_offsets, offsets_of([lengths[i] for i in index]))


@impls
@given(st.integers(1, 4), st.integers(0, 4), inner_shapes, dtypes, st.data())
@settings(max_examples=80)
def test_transposing_swaps_keys_and_samples_and_is_its_own_inverse(
    impl: k.Impl, num_keys: int, num_samples: int, inner: tuple[int, ...], dtype: torch.dtype, data: st.DataObject
) -> None:
    num_rows = num_keys * num_samples
    drawn = data.draw(st.lists(st.sampled_from([0, 1, 5, 16, 700]), min_size=num_rows, max_size=num_rows))
    offsets, values = offsets_of(drawn), random_values(sum(drawn), inner, dtype)
    rows = rows_of(values, offsets)
    expected = [rows[key * num_samples + b] for b in range(num_samples) for key in range(num_keys)]
    out, out_offsets = k.keyed_transpose(values, offsets, num_keys, impl=impl)
    assert torch.equal(out, torch.cat([values[:0], *expected]))
    assert torch.equal(out_offsets, offsets_of([len(row) for row in expected]))
    back, back_offsets = k.keyed_transpose(out, out_offsets, max(num_samples, 1), impl=impl)
    assert torch.equal(back, values)
    assert torch.equal(back_offsets, offsets)


@impls
def test_gradients_of_repeated_rows_add_up(impl: k.Impl) -> None:
    offsets, index = offsets_of([2, 3, 1]), torch.tensor([1, 0, 1], device=DEVICE)
    values = torch.randn(6, 3, device=DEVICE, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda v: k.jagged_permute(v, offsets, index, impl=impl)[0], (values,))
    out, _ = k.jagged_permute(values, offsets, index, impl=impl)
    (grad,) = torch.autograd.grad(out.sum(), values)
    assert grad[:, 0].tolist() == [1, 1, 2, 2, 2, 0]


@impls
def test_the_gradient_of_a_transpose_is_transposed_back(impl: k.Impl) -> None:
    offsets = offsets_of([2, 0, 3, 1, 1, 0])
    values = torch.randn(7, 2, device=DEVICE, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda v: k.keyed_transpose(v, offsets, 2, impl=impl)[0], (values,))


@pytest.mark.parametrize("num_rows", [16 * 1024, 16 * 1024 + 1, 40_000])
def test_many_rows_take_the_other_plan_to_the_same_place(num_rows: int) -> None:
    drawn = torch.randint(0, 3, (num_rows,))
    offsets = offsets_of(drawn.tolist())
    values = torch.arange(int(drawn.sum()), device=DEVICE)
    index = torch.randperm(num_rows, device=DEVICE)
    found = k.jagged_permute(values, offsets, index, impl="triton")
    torch.testing.assert_close(found, k.jagged_permute(values, offsets, index, impl="reference"), rtol=0, atol=0)


def test_tiles_whose_rows_were_found_beforehand_hold_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    from fs_kernels import _copy_triton

    offsets = offsets_of([3000, 0, 0, 1, 9000, 5, 5, 0, 4000])
    values, index = torch.arange(16011, device=DEVICE), torch.tensor([8, 1, 4, 3, 0, 6, 2, 5, 7], device=DEVICE)
    expected = k.jagged_permute(values, offsets, index, impl="reference")
    for threshold in (1, 1 << 30):
        monkeypatch.setattr(_copy_triton, "_TILES_SEARCHED_BEFORE", threshold)
        found = k.jagged_permute(values, offsets, index, impl="triton")
        torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_strided_values_are_taken_as_they_look() -> None:
    values = torch.arange(24, device=DEVICE).view(12, 2)[:, 1]
    out, _ = k.jagged_permute(values, offsets_of([5, 7]), torch.tensor([1, 0], device=DEVICE), impl="triton")
    assert out.tolist() == values[5:].tolist() + values[:5].tolist()


@impls
def test_strided_offsets_and_index_are_taken_as_they_look(impl: k.Impl) -> None:
    values, offsets = torch.arange(6, device=DEVICE), torch.tensor([9, 0, 9, 1, 9, 3, 9, 4, 9, 6], device=DEVICE)[1::2]
    index = torch.tensor([3, 9, 0], device=DEVICE)[::2]
    assert k.jagged_permute(values, offsets, index, impl=impl)[0].tolist() == [4, 5, 0]
    assert k.keyed_transpose(values, offsets, 2, impl=impl)[0].tolist() == [0, 3, 1, 2, 4, 5]


@impls
def test_conjugates_and_negatives_still_to_be_taken_are_taken(impl: k.Impl) -> None:
    values = torch.randn(4, 2, dtype=torch.complex64, device=DEVICE).conj()
    offsets, index = torch.tensor([0, 1, 4], device=DEVICE), torch.tensor([1, 0], device=DEVICE)
    for x in (values, values.imag):
        assert torch.equal(k.jagged_permute(x, offsets, index, impl=impl)[0], torch.cat([x[1:], x[:1]]))
        assert torch.equal(k.merge_rows(x, x, torch.tensor([1, -1], device=DEVICE), impl=impl), x[[1, 0]])
        blocks, _ = k.ranged_dispatch([(x, None)], torch.tensor([0, 4], device=DEVICE), impl=impl)
        assert torch.equal(blocks.view(4, 2), x)
    weight, rows = torch.zeros(4, 2, device=DEVICE), torch.arange(4, device=DEVICE)
    k.sgd_update_(weight, rows, values.imag, lr=1.0, impl=impl)
    assert torch.equal(weight, -values.imag)
    each = torch.arange(5, device=DEVICE)
    assert torch.equal(k.segment_sum(values.imag, each, impl=impl), values.imag)


@pytest.mark.skipif(bool(ON_GPU), reason="values are checked on a CPU only")
@impls
@pytest.mark.parametrize(
    ("offsets", "index", "out_size", "wrong"),
    [
        ([0, 4, 2, 6], [0, 1], 2, "offsets must not decrease, got -2"),
        ([0, 4, 9], [1], None, "offsets must be within 0 to 6, got 0 to 9"),
        ([-2, 4], [0], None, "offsets must be within 0 to 6, got -2 to 4"),
        ([0, 1, 6], [2], None, "index must be from 0 to 1, got 2"),
        ([0, 1, 6], [-1], None, "index must be from 0 to 1, got -1"),
    ],
)
def test_on_a_cpu_rows_that_are_not_there_are_refused(
    impl: k.Impl, offsets: list[int], index: list[int], out_size: int | None, wrong: str
) -> None:
    with pytest.raises((ValueError, IndexError), match=wrong):
        k.jagged_permute(torch.zeros(6), torch.tensor(offsets), torch.tensor(index), out_size=out_size, impl=impl)


@pytest.mark.skipif(bool(ON_GPU), reason="values are checked on a CPU only")
def test_on_a_cpu_sizes_that_are_not_those_of_the_rows_are_refused() -> None:
    values, offsets = torch.zeros(6), torch.tensor([0, 1, 5])
    with pytest.raises(ValueError, match=r"out_size must be 4, .* got 2"):
        k.jagged_permute(values, offsets, torch.tensor([1]), out_size=2)
    with pytest.raises(ValueError, match="offsets must be from 0 to 6, got 0 to 5"):
        k.keyed_transpose(values, offsets, 2)


def test_wrong_arguments_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    values, offsets, index = torch.zeros(3), torch.tensor([0, 3]), torch.tensor([0])
    with pytest.raises(ValueError, match="offsets must be"):
        k.jagged_permute(values, offsets.float(), index)
    with pytest.raises(ValueError, match="index must be"):
        k.jagged_permute(values, offsets, index.float())
    with pytest.raises(ValueError, match="one device, cpu, got index on meta"):
        k.jagged_permute(values, offsets, index.to("meta"))
    with pytest.raises(ValueError, match="got a single number"):
        k.jagged_permute(torch.tensor(1.0), offsets, index)
    with pytest.raises(ValueError, match="divide the 1 rows, got 2"):
        k.keyed_transpose(values, offsets, 2)
    with pytest.raises(ValueError, match="impl must be one of"):
        k.jagged_permute(values, offsets, index, impl="cuda")  # pyright: ignore[reportArgumentType]
    monkeypatch.setattr("fs_kernels._dispatch.INTERPRET", False)
    with pytest.raises(ValueError, match="impl='triton' needs CUDA"):
        k.jagged_permute(values, offsets, index, impl="triton")


@pytest.mark.gpu
def test_more_than_2_to_the_31_values_are_permuted_and_exchanged() -> None:
    half = (1 << 30) + 7
    values = torch.empty(2 * half, dtype=torch.int8, device=DEVICE).random_()
    offsets, index = torch.tensor([0, half, 2 * half], device=DEVICE), torch.tensor([1, 0], device=DEVICE)
    out, out_offsets = k.jagged_permute(values, offsets, index)
    assert out_offsets.tolist() == [0, half, 2 * half]
    assert torch.equal(out[:half], values[half:])
    assert torch.equal(out[half:], values[:half])
    bounds = torch.tensor([0, 1, 2], device=DEVICE)
    blocks, block_offsets = k.ranged_dispatch([(values, offsets)], bounds, index=index)
    start = int(block_offsets[1])
    assert torch.equal(blocks[start : start + half], values[:half])
    (back,) = k.ranged_combine(blocks, [(values[:0], offsets)], bounds, index=index)
    assert torch.equal(back, values)
