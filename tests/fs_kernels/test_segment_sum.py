"""Sums of segments, by the reference and by the kernel, compiled where there is a GPU, else interpreted."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

import fs_kernels as k
from tests.fs_kernels.jagged import DEVICE, ON_GPU, offsets_of, random_values, rows_of

pytest.importorskip("triton", reason="needs triton: pip install 'freescale[triton]'")
pytestmark = ON_GPU

impls = pytest.mark.parametrize("impl", ["triton", "reference"])
lengths = st.lists(st.sampled_from([0, 1, 1, 2, 3, 5, 7, 8, 9, 15, 16, 17, 31, 33, 70]), max_size=7)
widths = st.sampled_from([1, 3, 16, 130])
dtypes = st.sampled_from([torch.float32, torch.float64, torch.float16, torch.bfloat16])
index_kinds = st.sampled_from([None, torch.int32, torch.int64])


@pytest.fixture(params=["planned", "one launch"])
def small_pieces(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """So small that segments of some ten rows take several levels."""
    from fs_kernels import segment_sum_triton as m

    for name, size in {"_ROWS": 2, "_CHUNK": 4, "_JOINED": 2, "_ONE_LAUNCH": 0, "_SHARERS": 3}.items():
        monkeypatch.setattr(m, name, size)
    if request.param == "one launch":
        monkeypatch.setattr(m, "_ONE_LAUNCH", 512)


def summed_by_hand(row: Tensor) -> Tensor:
    """Neighbours first: the definition, a segment at a time."""
    row = row.double() if row.dtype == torch.float64 else row.float()
    while len(row) > 1:
        even = len(row) // 2 * 2
        row = torch.cat([row[:even:2] + row[1:even:2], row[even:]])
    return row[0] if len(row) else row.new_zeros(row.shape[1])


def assert_same_bits(found: Tensor, expected: Tensor) -> None:
    # Triton's interpreter cuts bfloat16 off where a GPU rounds it: there, as near as one step.
    interpreted = found.dtype == torch.bfloat16 and DEVICE == "cpu"
    torch.testing.assert_close(found.cpu(), expected.cpu(), rtol=2**-7 if interpreted else 0, atol=0, equal_nan=False)


@pytest.mark.usefixtures("small_pieces")
@impls
@given(lengths, widths, dtypes, index_kinds)
@settings(max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_segments_bits_are_those_of_its_tree(
    impl: k.Impl, lengths: list[int], width: int, dtype: torch.dtype, index_kind: torch.dtype | None
) -> None:
    offsets = offsets_of(lengths)
    num_values = sum(lengths) if index_kind is None else 50
    values = random_values(num_values, (width,), dtype)
    index = None if index_kind is None else torch.randint(50, (sum(lengths),), device=DEVICE).to(index_kind)
    out = k.segment_sum(values, offsets, index=index, impl=impl)
    summands = values if index is None else values[index.long()]
    expected = [summed_by_hand(row.cpu()).to(dtype) for row in rows_of(summands, offsets)]
    assert_same_bits(out, torch.stack([values.new_zeros(width).cpu(), *expected])[1:])


@impls
@given(lengths, st.integers(0, 7))
@settings(max_examples=8)
def test_a_segments_bits_do_not_depend_on_the_others(impl: k.Impl, lengths: list[int], cut: int) -> None:
    offsets = offsets_of(lengths)
    values = random_values(sum(lengths), (5,), torch.float32)
    together = k.segment_sum(values, offsets, impl=impl)
    cut = min(cut, len(lengths))
    left = k.segment_sum(values[: offsets[cut]], offsets[: cut + 1], impl=impl)
    right = k.segment_sum(values[offsets[cut] :], offsets[cut:] - offsets[cut], impl=impl)
    assert_same_bits(torch.cat([left, right]), together)


@pytest.mark.parametrize("num_rows", [9_000, pytest.param(1_000_001, marks=[] if ON_GPU else pytest.mark.slow)])
def test_a_long_segment_among_short_ones_is_summed_in_pieces(num_rows: int) -> None:
    offsets = offsets_of([1, 0, num_rows, 17, 257, 16])
    values = torch.randn(int(offsets[-1]), 4, device=DEVICE)
    found = k.segment_sum(values, offsets, impl="triton" if num_rows < 10_000 or ON_GPU else "reference")
    assert_same_bits(found, k.segment_sum(values, offsets, impl="reference"))
    torch.testing.assert_close(found[2].double(), values[1 : num_rows + 1].double().sum(0), rtol=1e-4, atol=1e-2)


@impls
def test_the_tree_adds_neighbours_first(impl: k.Impl) -> None:
    big, small = 2.0**24, 1.0  # big + small == big in float32
    values = torch.tensor([[big], [small], [small], [small]], device=DEVICE)
    assert k.segment_sum(values, offsets_of([4]), impl=impl).item() == big + 2.0
    assert k.segment_sum(values[:3], offsets_of([3]), impl=impl).item() == big
    index = torch.tensor([1, 2, 0], device=DEVICE)
    assert k.segment_sum(values, offsets_of([3]), index=index, impl=impl).item() == big + 2.0


@impls
@pytest.mark.parametrize("indexed", [False, True])
def test_the_gradient_is_that_of_a_sum(impl: k.Impl, indexed: bool) -> None:
    values = torch.randn(7, 3, dtype=torch.float64, device=DEVICE, requires_grad=True)
    index = torch.tensor([0, 2, 2, 6, 1, 0, 5], device=DEVICE) if indexed else None
    offsets = offsets_of([4, 0, 2, 1])
    assert torch.autograd.gradcheck(lambda v: k.segment_sum(v, offsets, index=index, impl=impl), (values,))
    weight = torch.randn(4, 3, dtype=torch.float64, device=DEVICE)
    (grad,) = torch.autograd.grad((k.segment_sum(values, offsets, index=index, impl=impl) * weight).sum(), values)
    if not indexed:
        assert torch.equal(grad, weight[[0, 0, 0, 0, 2, 2, 3]])
    else:
        torch.testing.assert_close(grad[0], weight[0] + weight[2], rtol=0, atol=0)
        assert not grad[[3, 4]].any()


@impls
def test_nothing_gives_nothing_and_empty_segments_zeros(impl: k.Impl) -> None:
    for rows, width, lengths in ((0, 3, []), (0, 0, [0, 0]), (0, 3, [0, 0])):
        out = k.segment_sum(torch.empty(rows, width, device=DEVICE), offsets_of(lengths), impl=impl)
        assert torch.equal(out, torch.zeros(len(lengths), width, device=DEVICE))


@impls
def test_the_operation_keeps_the_dispatchers_rules(impl: k.Impl) -> None:
    values = torch.randn(7, 3, device=DEVICE, requires_grad=True)
    index = torch.tensor([0, 2, 2, 6, 1, 0, 5], device=DEVICE)
    torch.library.opcheck(torch.ops.fs_kernels.segment_sum.default, (values, offsets_of([4, 0, 3]), index, impl))


@pytest.mark.skipif(bool(ON_GPU), reason="values are checked on a CPU only")
@impls
@pytest.mark.parametrize(
    ("offsets", "index", "wrong"),
    [
        ([0, 3, 2, 6], None, "offsets must not decrease, got -1"),
        ([1, 6], None, "offsets must be from 0 to 6, got 1 to 6"),
        ([0, 7], None, "offsets must be from 0 to 6, got 0 to 7"),
        ([0, 1], [0, 1], "offsets must be from 0 to 2, got 0 to 1"),
        ([0, 2], [0, 6], "index must be from 0 to 5, got 6"),
        ([0, 2], [-1, 0], "index must be from 0 to 5, got -1"),
    ],
)
def test_on_a_cpu_rows_that_are_not_there_are_refused(
    impl: k.Impl, offsets: list[int], index: list[int] | None, wrong: str
) -> None:
    rows = None if index is None else torch.tensor(index)
    with pytest.raises((ValueError, IndexError), match=wrong):
        k.segment_sum(torch.zeros(6, 2), torch.tensor(offsets), index=rows, impl=impl)


def test_wrong_arguments_are_named() -> None:
    with pytest.raises(ValueError, match="values must be float"):
        k.segment_sum(torch.ones(3, 2, dtype=torch.int64), torch.tensor([0, 3]))
    with pytest.raises(ValueError, match="offsets must be"):
        k.segment_sum(torch.zeros(3, 2), torch.zeros(2))
    with pytest.raises(ValueError, match="index must be"):
        k.segment_sum(torch.zeros(3, 2), torch.tensor([0, 3]), index=torch.zeros(3))
