"""Triton kernels against their references: compiled where there is a GPU, else in Triton's interpreter."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fs_kernels as k

pytest.importorskip("triton", reason="needs triton: pip install 'freescale[triton]'")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
lengths = st.lists(st.sampled_from([0, 1, 15, 16, 17, 700]), min_size=1, max_size=5)
dtypes = st.sampled_from([torch.float32, torch.int64, torch.bfloat16, torch.bool, torch.int8])


@given(lengths, st.sampled_from([(), (1,), (3,), (2, 4)]), dtypes, st.data())
@settings(max_examples=40)
def test_jagged_permute_moves_the_references_bits(
    lengths: list[int], inner: tuple[int, ...], dtype: torch.dtype, data: st.DataObject
) -> None:
    offsets = torch.tensor([0, *lengths]).cumsum(0).to(DEVICE)
    values = (torch.randn(sum(lengths), *inner) * 9).to(dtype).to(DEVICE)
    index = torch.tensor(data.draw(st.lists(st.integers(0, len(lengths) - 1), max_size=6)), dtype=torch.int64).to(
        DEVICE
    )
    found = k.jagged_permute(values, offsets, index, impl="triton")
    torch.testing.assert_close(found, k.jagged_permute(values, offsets, index, impl="reference"), rtol=0, atol=0)


def test_jagged_permute_adds_the_gradients_of_repeated_rows() -> None:
    offsets, index = torch.tensor([0, 2, 5], device=DEVICE), torch.tensor([1, 0, 1], device=DEVICE)
    values = torch.randn(5, 3, device=DEVICE, requires_grad=True)
    out, _ = k.jagged_permute(values, offsets, index, impl="triton")
    weight = torch.randn_like(out)
    (grad,) = torch.autograd.grad((out * weight).sum(), values)
    out, _ = k.jagged_permute(values, offsets, index, impl="reference")
    (expected,) = torch.autograd.grad((out * weight).sum(), values)
    torch.testing.assert_close(grad, expected, rtol=0, atol=0)
