"""Samples into blocks and out of them, by the reference and by the kernels, against slices and concatenations."""

import itertools
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import fs_kernels as k
from tests.fs_kernels.jagged import DEVICE, ON_GPU, dtypes, inner_shapes, offsets_of, random_values, rows_of

pytest.importorskip("triton", reason="needs triton: pip install 'freescale[triton]'")
pytestmark = ON_GPU

impls = pytest.mark.parametrize("impl", ["triton", "reference"])


@dataclass
class Case:
    columns: list[tuple[Tensor, Tensor]]
    num_keys: list[int]
    bounds: Tensor
    index: Tensor | None
    samples: list[int]
    """Those that are exchanged, in order."""

    def pieces(self, rank: int) -> list[Tensor]:
        """The values of each column that go to `rank`, key after key."""
        first, stop = self.bounds[rank : rank + 2].tolist()
        found: list[Tensor] = []
        for (values, offsets), num_keys in zip(self.columns, self.num_keys, strict=True):
            rows = rows_of(values, offsets)
            num_samples = len(rows) // num_keys
            mine = [rows[k * num_samples + b] for k in range(num_keys) for b in self.samples[first:stop]]
            found.append(torch.cat([values[:0], *mine]))
        return found


def as_bytes(x: Tensor) -> Tensor:
    return x.contiguous().flatten().view(torch.uint8) if x.numel() else x.new_empty(0, dtype=torch.uint8)


@st.composite
def cases(draw: st.DrawFn, *, distinct: bool = False) -> Case:
    num_samples = draw(st.integers(0, 5))
    columns: list[tuple[Tensor, Tensor]] = []
    num_keys: list[int] = []
    for _ in range(draw(st.integers(1, 3))):
        num_keys.append(draw(st.sampled_from([1, 1, 2, 3])))
        size = num_keys[-1] * num_samples
        drawn = draw(st.lists(st.sampled_from([0, 1, 3, 16, 17, 700]), min_size=size, max_size=size))
        columns.append((random_values(sum(drawn), draw(inner_shapes), draw(dtypes)), offsets_of(drawn)))
    samples, index = list(range(num_samples)), None
    if draw(st.booleans()):
        samples = draw(st.lists(st.sampled_from(samples), unique=distinct, max_size=7)) if samples else []
        index = torch.tensor(samples, dtype=draw(st.sampled_from([torch.int32, torch.int64])), device=DEVICE)
    cuts = draw(st.lists(st.integers(0, len(samples)), max_size=3))
    return Case(columns, num_keys, torch.tensor(sorted([0, *cuts, len(samples)]), device=DEVICE), index, samples)


@impls
@given(cases())
@settings(max_examples=60)
def test_blocks_hold_each_ranks_samples_column_by_column(impl: k.Impl, case: Case) -> None:
    blocks, block_offsets = k.ranged_dispatch(
        case.columns, case.bounds, index=case.index, num_keys=case.num_keys, impl=impl
    )
    dtypes = {values.dtype for values, _ in case.columns}
    assert blocks.dtype == (dtypes.pop() if len(dtypes) == 1 else torch.uint8)
    found = as_bytes(blocks)
    cuts = (block_offsets * blocks.element_size()).tolist()
    assert len(cuts) == len(case.bounds)
    assert (cuts[0], cuts[-1]) == (0, len(found))
    for rank, (start, stop) in enumerate(itertools.pairwise(cuts)):
        pieces = [as_bytes(p) for p in case.pieces(rank)]
        padded = [torch.cat([p, p.new_zeros(-len(p) % 16)]) for p in pieces]
        assert torch.equal(found[start:stop], torch.cat(padded))


@impls
@given(cases(distinct=True), st.booleans(), st.sampled_from([0, 16, 48]))
@settings(max_examples=60)
def test_combining_puts_every_sample_back(impl: k.Impl, case: Case, knows_sizes: bool, room: int) -> None:
    """Also where blocks begin at places that were agreed on, with room to spare."""
    num_ranks = len(case.bounds) - 1
    blocks, dense = k.ranged_dispatch(case.columns, case.bounds, index=case.index, num_keys=case.num_keys, impl=impl)
    agreed = dense + torch.arange(num_ranks + 1, device=DEVICE) * room
    if room:
        blocks, returned = k.ranged_dispatch(
            case.columns, case.bounds, index=case.index, num_keys=case.num_keys,
            block_offsets=agreed, out_size=int(agreed[-1]), impl=impl,
        )  # fmt: skip
        assert torch.equal(returned, agreed)
    came = k.ranged_combine(
        blocks, [(values[:0], offsets) for values, offsets in case.columns], case.bounds, index=case.index,
        num_keys=case.num_keys, block_offsets=agreed if room else None,
        out_sizes=[len(values) for values, _ in case.columns] if knows_sizes else None, impl=impl,
    )  # fmt: skip
    for (values, offsets), num_keys, found in zip(case.columns, case.num_keys, came, strict=True):
        expected = torch.zeros_like(values)
        num_samples = (len(offsets) - 1) // num_keys
        for key, b in itertools.product(range(num_keys), case.samples):
            a, z = offsets[key * num_samples + b : key * num_samples + b + 2].tolist()
            expected[a:z] = values[a:z]
        assert torch.equal(as_bytes(found), as_bytes(expected))


@impls
def test_rows_of_one_value_need_no_offsets(impl: k.Impl) -> None:
    labels, ids = torch.tensor([1.0, 2.0, 3.0], device=DEVICE), torch.arange(5, device=DEVICE)
    columns, bounds = [(labels, None), (ids, offsets_of([2, 0, 3]))], torch.tensor([0, 2, 3], device=DEVICE)
    blocks, block_offsets = k.ranged_dispatch(columns, bounds, impl=impl)
    assert block_offsets.tolist() == [0, 32, 80]
    assert blocks[:8].view(torch.float32).tolist() == [1.0, 2.0]
    assert blocks[48:72].view(torch.int64).tolist() == [2, 3, 4]
    for like in (columns, [(values[:0], offsets) for values, offsets in columns]):
        came = k.ranged_combine(blocks, like, bounds, impl=impl)
        assert [x.tolist() for x in came] == [labels.tolist(), ids.tolist()]


@pytest.mark.parametrize(("num_columns", "placed_by_one"), [(16, 1 << 14), (17, 1 << 14), (35, 0), (2, 0)])
def test_columns_and_ranges_beyond_what_one_launch_takes_make_the_same_blocks(
    num_columns: int, placed_by_one: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fs_kernels import ranged_exchange_triton

    monkeypatch.setattr(ranged_exchange_triton, "_PLACED_BY_ONE", placed_by_one)
    offsets = offsets_of([3, 0, 2, 1, 1, 4])
    columns = [((torch.arange(11, device=DEVICE) + i).int(), offsets) for i in range(num_columns)]
    bounds, index = torch.tensor([0, 1, 3], device=DEVICE), torch.tensor([2, 0, 1], device=DEVICE)
    keys = [2] * num_columns
    for i in (None, index):
        expected = k.ranged_dispatch(columns, bounds, index=i, num_keys=keys, impl="reference")
        found = k.ranged_dispatch(columns, bounds, index=i, num_keys=keys, impl="triton")
        torch.testing.assert_close(found, expected, rtol=0, atol=0)
        agreed = expected[1] + torch.tensor([0, 8, 12], device=DEVICE)
        where = {"index": i, "num_keys": keys, "block_offsets": agreed, "out_size": int(agreed[-1])}
        expected = k.ranged_dispatch(columns, bounds, **where, impl="reference")
        found = k.ranged_dispatch(columns, bounds, **where, impl="triton")
        torch.testing.assert_close(found, expected, rtol=0, atol=0)


@impls
@pytest.mark.parametrize("index", [None, [2, 0], [1, 1, 0, 1]])
def test_gradients_come_back_to_the_samples_that_were_sent(impl: k.Impl, index: list[int] | None) -> None:
    values = [torch.randn(5, 2, dtype=torch.float64, device=DEVICE, requires_grad=True) for _ in range(2)]
    where, bounds = None, torch.tensor([0, 1, 3], device=DEVICE)
    if index is not None:
        where = torch.tensor(index, device=DEVICE)
        bounds = torch.tensor([0, 1, len(index)], device=DEVICE)
    offsets = [offsets_of([2, 0, 3]), offsets_of([1, 3, 1])]

    def dispatch(*values: Tensor) -> Tensor:
        return k.ranged_dispatch(list(zip(values, offsets, strict=True)), bounds, index=where, impl=impl)[0]

    assert torch.autograd.gradcheck(dispatch, values)
    if index is None or len(set(index)) == len(index):
        blocks = dispatch(*values).detach().requires_grad_()
        like = [(v.detach()[:0], o) for v, o in zip(values, offsets, strict=True)]
        assert torch.autograd.gradcheck(
            lambda b: tuple(k.ranged_combine(b, like, bounds, index=where, impl=impl)), (blocks,)
        )


@impls
def test_there_and_back_is_one_graph(impl: k.Impl) -> None:
    offsets, bounds = offsets_of([2, 0, 3]), torch.tensor([0, 1, 3], device=DEVICE)
    index = torch.tensor([2, 0, 1], device=DEVICE)

    def there_and_back(values: Tensor) -> Tensor:
        blocks, _ = k.ranged_dispatch([(values * 2, offsets)], bounds, index=index, out_size=12, impl=impl)
        (came,) = k.ranged_combine(blocks + 1, [(values[:0], offsets)], bounds, index=index, out_sizes=[5], impl=impl)
        return came

    values = torch.randn(5, 2, device=DEVICE, requires_grad=True)
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        out = torch.compile(there_and_back, fullgraph=True, backend="aot_eager")(values)
        torch.testing.assert_close(out, values * 2 + 1)
        (grad,) = torch.autograd.grad(out.sum(), values)
    torch.testing.assert_close(grad, torch.full_like(grad, 2.0))


@pytest.mark.parametrize("index", [None, [2, 0, 1]])
@impls
def test_both_operations_keep_the_dispatchers_rules(impl: k.Impl, index: list[int] | None) -> None:
    values = [torch.randn(6, device=DEVICE, requires_grad=True), torch.randn(3, 2, device=DEVICE)]
    offsets, bounds = [offsets_of([1, 2, 3]), offsets_of([1, 1, 1])], torch.tensor([0, 2, 3], device=DEVICE)
    where = None if index is None else torch.tensor(index, device=DEVICE)
    ops = torch.ops.fs_kernels
    torch.library.opcheck(ops.ranged_dispatch.default, (values, offsets, [1, 1], bounds, where, None, 20, impl))
    blocks = torch.randn(20, device=DEVICE, requires_grad=True)
    like = [v.detach()[:0] for v in values]
    arguments = (blocks, like, offsets, [1, 1], bounds, where, None, [6, 3], False, impl)
    torch.library.opcheck(ops.ranged_combine.default, arguments)


@impls
@pytest.mark.parametrize("indexed", [False, True])
def test_strided_offsets_bounds_and_index_are_taken_as_they_look(impl: k.Impl, indexed: bool) -> None:
    def strided(*numbers: int) -> Tensor:
        return torch.tensor([n for x in numbers for n in (99, x)], device=DEVICE)[1::2]

    values, offsets, where = torch.arange(6, device=DEVICE), strided(0, 1, 3, 6), strided(2, 0, 1) if indexed else None
    bounds, starts = strided(0, 1, 3), strided(0, 4, 10)
    blocks, _ = k.ranged_dispatch([(values, offsets)], bounds, index=where, block_offsets=starts, impl=impl)
    assert blocks.tolist() == ([3, 4, 5, 0, 0, 1, 2, 0, 0, 0] if indexed else [0, 0, 0, 0, 1, 2, 3, 4, 5, 0])
    (back,) = k.ranged_combine(blocks, [(values[:0], offsets)], bounds, index=where, block_offsets=starts, impl=impl)
    assert back.tolist() == values.tolist()


@pytest.mark.skipif(bool(ON_GPU), reason="values are checked on a CPU only")
@impls
def test_on_a_cpu_samples_that_are_not_there_are_refused(impl: k.Impl) -> None:
    values, offsets = torch.arange(6.0), torch.tensor([0, 1, 3, 6])
    column, like, bounds = (values, offsets), (values[:0], offsets), torch.tensor([0, 1, 3])
    blocks, _ = k.ranged_dispatch([column], bounds, impl=impl)
    for end, wrong in ((2, "got 0 to 2"), (4, "got 0 to 4")):
        bad = torch.tensor([0, 1, end])
        with pytest.raises(ValueError, match=f"bounds must be from 0 to 3, {wrong}"):
            k.ranged_dispatch([column], bad, impl=impl)
        with pytest.raises(ValueError, match=f"bounds must be from 0 to 3, {wrong}"):
            k.ranged_combine(blocks, [like], bad, impl=impl)
    with pytest.raises(ValueError, match="bounds must not decrease, got -1"):
        k.ranged_dispatch([column], torch.tensor([0, 2, 1, 3]), impl=impl)
    with pytest.raises(ValueError, match="offsets of column 0 must be within 0 to 6, got 0 to 7"):
        k.ranged_dispatch([(values, torch.tensor([0, 1, 3, 7]))], bounds, impl=impl)
    with pytest.raises(IndexError, match="index must be from 0 to 2, got -1"):
        k.ranged_dispatch([column], bounds, index=torch.tensor([0, -1, 1]), impl=impl)
    with pytest.raises(ValueError, match="block_offsets must come to multiples of 16 bytes"):
        k.ranged_dispatch([column], bounds, block_offsets=torch.tensor([0, 3, 12]), impl=impl)
    with pytest.raises(ValueError, match="index must be distinct, got sample 0 more than once"):
        k.ranged_combine(blocks, [like], bounds, index=torch.tensor([0, 0, 1]), impl=impl)
    with pytest.raises(ValueError, match="offsets of column 0 must be from 0 to 8, got 0 to 6"):
        k.ranged_combine(blocks, [like], bounds, out_sizes=[8], impl=impl)


def test_on_a_cpu_buffers_without_room_are_refused() -> None:
    values, offsets, bounds = torch.arange(6.0), torch.tensor([0, 1, 3, 6]), torch.tensor([0, 1, 3])
    with pytest.raises(ValueError, match=r"block_offsets must leave room .* \[16, 32\] bytes, got \[16, 0\]"):
        k.ranged_dispatch([(values, offsets)], bounds, block_offsets=torch.tensor([0, 4, 4]))
    with pytest.raises(ValueError, match="out_size must come to the 48 bytes of all blocks, got 16"):
        k.ranged_dispatch([(values, offsets)], bounds, out_size=4)
    with pytest.raises(ValueError, match="blocks must come to the 48 bytes of all blocks, got 16"):
        k.ranged_combine(torch.zeros(4), [(values[:0], offsets)], bounds)


def test_wrong_arguments_are_named() -> None:
    column, bounds = (torch.zeros(3), torch.tensor([0, 1, 3])), torch.tensor([0, 2])
    with pytest.raises(ValueError, match="at least one column"):
        k.ranged_dispatch([], bounds)
    with pytest.raises(ValueError, match=r"num_keys must be one number .* got \[2, 1\]"):
        k.ranged_dispatch([column], bounds, num_keys=[2, 1])
    with pytest.raises(ValueError, match=r"column 1 must be \(1 keys \* 2 samples \+ 1,\), got \(2,\)"):
        k.ranged_dispatch([column, (torch.zeros(3), torch.tensor([0, 3]))], bounds)
    with pytest.raises(ValueError, match=r"column 1 must be \(1 keys \* 2 samples \+ 1,\), got \(4,\)"):
        k.ranged_dispatch([column, (torch.zeros(3), None)], bounds)
    with pytest.raises(ValueError, match="block_offsets must be"):
        k.ranged_dispatch([column], bounds, block_offsets=torch.tensor([0]))
    with pytest.raises(ValueError, match="out_size must come to a multiple of 16 bytes, got 3"):
        k.ranged_dispatch([column], bounds, out_size=3)
    with pytest.raises(ValueError, match=r"blocks must be .* a multiple of 16 bytes"):
        k.ranged_combine(torch.zeros(3), [column], bounds)
    with pytest.raises(ValueError, match=r"blocks must be torch.float32, .* got torch.int64"):
        k.ranged_combine(torch.arange(4), [column], bounds)
    with pytest.raises(ValueError, match="out_sizes must be one number for each of 1 columns"):
        k.ranged_combine(torch.zeros(4), [column], bounds, out_sizes=[])
