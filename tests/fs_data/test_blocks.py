"""Blocks made and taken apart by kernels, as on a GPU, against those of the host."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fs_data.blocks import pack_all, unpack_all
from fs_data.column import Column, Part, join
from fs_data.pack import block_bytes, pack
from tests.fs_data.test_column import columns, rows_of

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = [pytest.mark.gpu] if torch.cuda.is_available() else []


@st.composite
def batches(draw: st.DrawFn) -> list[Column]:
    """Columns of 0 to 4 samples, of several kinds."""
    num_samples = draw(st.integers(0, 4))
    found: list[Column] = []
    for _ in range(draw(st.integers(1, 3))):
        num_keys, shape = draw(st.integers(0, 3)), draw(st.sampled_from([(), (3,), (2, 2)]))
        column = draw(columns(num_keys, shape, draw(st.sampled_from([torch.int64, torch.bool, torch.bfloat16]))))
        index = np.arange(num_samples) % max(column.num_samples, 1)
        if column.num_samples or not num_samples:
            column = join(column.spec, [Part(column, index[i : i + 1]) for i in range(num_samples)])
            found.append(column)
    return found


def on_device(column: Column) -> Column:
    return Column(column.values.to(DEVICE), column.offsets, column.num_keys)


@settings(deadline=None, max_examples=150)
@given(batches(), st.data())
def test_blocks_of_the_device_are_those_of_the_host(batch: list[Column], data: st.DataObject) -> None:
    if not batch:
        return
    num_samples = batch[0].num_samples
    choose = st.lists(st.integers(0, num_samples - 1), unique=True).map(sorted) if num_samples else st.just([])
    samples = [np.asarray(data.draw(choose), np.int64) for _ in range(3)]
    needed = sum(c.sample_bytes() for c in batch)
    sizes = [block_bytes(len(batch), needed[s]) for s in samples]
    expected = torch.zeros(sum(sizes), dtype=torch.uint8)
    for block, index in zip(expected.split(sizes), samples, strict=True):
        pack(batch, index, block)
    found = pack_all([on_device(c) for c in batch], samples, sizes)
    assert torch.equal(found.cpu(), expected)

    order = np.random.default_rng(0).permutation(sum(map(len, samples)))
    came = unpack_all([c.spec for c in batch], found, [len(s) for s in samples], sizes, order)
    sent = np.concatenate(samples)
    for column, got in zip(batch, came, strict=True):
        mine, theirs = rows_of(column), rows_of(Column(got.values.cpu(), got.offsets, got.num_keys))
        assert [theirs[place] for place in order] == [mine[i] for i in sent]
        assert got.spec == column.spec
