"""What tests of jagged operations share: where they run, and jagged tensors drawn around the sizes of blocks."""

import itertools

import pytest
import torch
from hypothesis import strategies as st

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# The same tests run compiled where there is a GPU (`make test-gpu`), and in Triton's interpreter elsewhere.
ON_GPU = [pytest.mark.gpu] if torch.cuda.is_available() else []

lengths = st.lists(st.sampled_from([0, 0, 1, 2, 15, 16, 17, 63, 64, 65, 700, 2100]), min_size=1, max_size=6)
inner_shapes = st.sampled_from([(), (1,), (3,), (4,), (2, 4)])
dtypes = st.sampled_from([torch.int64, torch.float32, torch.bfloat16, torch.int8, torch.bool, torch.complex128])
index_dtypes = st.sampled_from([torch.int32, torch.int64])


def offsets_of(lengths: list[int]) -> torch.Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to(DEVICE)


def random_values(num_values: int, inner: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Between NaN, or the largest number, at both ends: what is read from outside shows."""
    padded = torch.full((num_values + 4, *inner), torch.nan if dtype.is_floating_point else 1).to(dtype)
    values = padded[2:-2] if num_values else padded[2:2]
    values.copy_(torch.randn(num_values, *inner) * 9)
    return padded.to(DEVICE)[2 : 2 + num_values]


def rows_of(values: torch.Tensor, offsets: torch.Tensor) -> list[torch.Tensor]:
    bounds = offsets.tolist()
    return [values[a:b] for a, b in itertools.pairwise(bounds)]
