"""Common ids of two sets, by the reference and by the kernel, compiled where there is a GPU, else interpreted."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fs_kernels as k
from tests.fs_kernels.jagged import DEVICE, ON_GPU, index_dtypes

pytest.importorskip("triton", reason="needs triton: pip install 'freescale[triton]'")
pytestmark = ON_GPU

impls = pytest.mark.parametrize("impl", ["triton", "reference"])
narrow, wide = torch.iinfo(torch.int32), torch.iinfo(torch.int64)
# Neighbours, multiples of powers of two that a poor hash would put into one slot, and both ends.
ids_32 = st.integers(-3, 20) | st.integers(0, 20).map(lambda n: n << 20) | st.sampled_from([narrow.min, narrow.max])
ids_64 = ids_32 | st.integers(0, 20).map(lambda n: n << 40) | st.sampled_from([wide.min, wide.min + 1, wide.max])


@impls
@given(index_dtypes, st.data())
@settings(max_examples=50)
def test_collisions_are_the_common_ids(impl: k.Impl, dtype: torch.dtype, data: st.DataObject) -> None:
    of = st.lists(ids_32 if dtype == torch.int32 else ids_64, max_size=200)
    ids, other = data.draw(of), data.draw(of)
    found = k.collision_split(
        torch.tensor(ids, dtype=dtype, device=DEVICE), torch.tensor(other, dtype=dtype, device=DEVICE), impl=impl
    )
    assert found.tolist() == [i in other for i in ids]


def test_many_ids_find_each_other_however_often_they_occur() -> None:
    size = 200_000 if ON_GPU else 2_000
    for high in (5, size, size * 1000):
        ids, other = (torch.randint(-high, high, (size,), device=DEVICE) for _ in range(2))
        assert torch.equal(k.collision_split(ids, other, impl="triton"), torch.isin(ids, other))


def test_the_table_is_the_same_in_every_order_of_ids() -> None:
    from fs_kernels.collision_split_triton import fill_table

    other = torch.randint(0, 1 << 40, (700,), device=DEVICE)
    tables = [fill_table(other[torch.randperm(700, device=DEVICE)]) for _ in range(3)]
    assert all(torch.equal(table, tables[0]) for table in tables)
    held = tables[0][tables[0] != wide.min]
    assert torch.equal(held.sort().values, other.unique())


@impls
def test_the_operation_keeps_the_dispatchers_rules(impl: k.Impl) -> None:
    ids, other = torch.tensor([1, 5, 1], device=DEVICE), torch.tensor([1, 2], device=DEVICE)
    torch.library.opcheck(torch.ops.fs_kernels.collision_split.default, (ids, other, impl))


def test_wrong_arguments_are_named() -> None:
    with pytest.raises(ValueError, match="other must be"):
        k.collision_split(torch.tensor([1]), torch.tensor([1.0]))
    with pytest.raises(ValueError, match="one device, cpu, got other on meta"):
        k.collision_split(torch.tensor([1]), torch.tensor([1], device="meta"))
