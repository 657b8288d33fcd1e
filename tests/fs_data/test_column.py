"""Columns and blocks: the arithmetic under every exchange."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fs_data.column import Column, Part, join, join_by_kernel, join_by_slices, to_offsets
from fs_data.pack import block_bytes, pack, unpack


@st.composite
def columns(draw: st.DrawFn, num_keys: int, shape: tuple[int, ...], dtype: torch.dtype) -> Column:
    num_samples = draw(st.integers(0, 6))
    lengths = np.asarray(
        draw(st.lists(st.integers(0, 4), min_size=num_keys * num_samples, max_size=num_keys * num_samples)), np.int64
    )
    num_values = int(lengths.sum()) if num_keys else num_samples
    values = torch.randint(0, 100, (num_values, *shape)).to(dtype)
    return Column(values, to_offsets(lengths), num_keys) if num_keys else Column(values)


@st.composite
def several_parts(draw: st.DrawFn) -> list[Part]:
    """Parts of 1 to 4 columns of one kind, each with some of its samples in ascending order."""
    num_keys, shape = draw(st.integers(0, 3)), draw(st.sampled_from([(), (3,), (2, 2)]))
    dtype = draw(st.sampled_from([torch.int64, torch.bool, torch.bfloat16]))
    found = draw(st.lists(columns(num_keys, shape, dtype), min_size=1, max_size=4))
    keep = [draw(st.lists(st.booleans(), min_size=c.num_samples, max_size=c.num_samples)) for c in found]
    return [Part(c, np.flatnonzero(k)) for c, k in zip(found, keep, strict=True)]


def rows_of(column: Column) -> list[list[list[float]]]:
    """By sample, then by key."""
    if column.offsets is None:
        return [[row] for row in column.values.double().tolist()]
    rows = [r.double().tolist() for r in column.values.split(np.diff(column.offsets).tolist())]
    return [rows[b :: column.num_samples] for b in range(column.num_samples)]


@settings(deadline=None, max_examples=200)
@given(several_parts())
def test_joined_samples_are_those_of_the_parts_in_order(parts: list[Part]) -> None:
    joined = join(parts[0].column.spec, parts)
    assert rows_of(joined) == [rows_of(p.column)[i] for p in parts for i in p.index.tolist()]
    assert joined.spec == parts[0].column.spec


@settings(deadline=None, max_examples=200)
@given(several_parts())
def test_the_kernel_joins_as_slices_do(parts: list[Part]) -> None:
    parts = [p for p in parts if len(p.index)]
    if parts:
        spec = parts[0].column.spec
        assert torch.equal(join_by_kernel(spec, parts), join_by_slices(spec, parts))


@settings(deadline=None, max_examples=200)
@given(several_parts(), several_parts())
def test_what_is_packed_comes_out_again(first: list[Part], second: list[Part]) -> None:
    size = min(first[0].column.num_samples, second[0].column.num_samples)
    mine = [join(p.column.spec, [Part(p.column, np.arange(size))]) for p in (first[0], second[0])]
    index = np.arange(0, size, 2)
    block = torch.zeros(block_bytes(len(mine), sum(c.sample_bytes() for c in mine)[index]), dtype=torch.uint8)
    pack(mine, index, block)
    for column, got in zip(mine, unpack([c.spec for c in mine], len(index), block), strict=True):
        assert rows_of(got) == rows_of(join(column.spec, [Part(column, index)]))


def test_neighbours_share_a_slice() -> None:
    column = Column(torch.arange(10), to_offsets(np.asarray([1, 2, 3, 4])))
    assert column.rows(0, np.asarray([0, 1, 3])) == [slice(0, 3), slice(6, 10)]
    assert column.rows(0, np.asarray([], np.int64)) == []


def test_sections_are_aligned_for_every_dtype() -> None:
    odd = Column(torch.zeros(3, 5, dtype=torch.uint8))
    wide = Column(torch.arange(3).to(torch.complex128))
    block = torch.zeros(block_bytes(2, odd.sample_bytes() + wide.sample_bytes()), dtype=torch.uint8)
    pack([odd, wide], np.arange(3), block)
    assert unpack([odd.spec, wide.spec], 3, block)[1].values.tolist() == [0, 1, 2]


@pytest.mark.parametrize("num_samples", [0, 1])
def test_a_sample_without_values_still_arrives(num_samples: int) -> None:
    column = Column(torch.zeros(0, 2), to_offsets(np.zeros(num_samples, np.int64)))
    block = torch.zeros(block_bytes(1, column.sample_bytes()), dtype=torch.uint8)
    pack([column], np.arange(num_samples), block)
    assert unpack([column.spec], num_samples, block)[0].num_samples == num_samples
