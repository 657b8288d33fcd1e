"""The references: what each operation means, and the law that makes prioritized training exact."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fs_kernels as k

lengths = st.lists(st.sampled_from([0, 1, 2, 3, 15, 16, 17, 64, 65]), min_size=1, max_size=6)
widths = st.sampled_from([1, 3, 7, 8, 16, 17, 64])
dtypes = st.sampled_from([torch.float32, torch.float64, torch.float16, torch.bfloat16])


def offsets_of(lengths: list[int]) -> torch.Tensor:
    return torch.tensor([0, *lengths]).cumsum(0)


@given(lengths, st.data())
def test_permuting_rows_is_permuting_lists(lengths: list[int], data: st.DataObject) -> None:
    offsets = offsets_of(lengths)
    values = torch.randn(int(offsets[-1]), 2)
    index = data.draw(st.lists(st.integers(0, len(lengths) - 1), max_size=8))
    out, out_offsets = k.jagged_permute(values, offsets, torch.tensor(index, dtype=torch.int64))
    rows = values.split(lengths)
    expected = torch.cat([values[:0], *(rows[i] for i in index)])
    torch.testing.assert_close(out, expected, rtol=0, atol=0)
    assert out_offsets.tolist() == offsets_of([lengths[i] for i in index]).tolist()


@given(lengths, widths, dtypes)
def test_a_segments_bits_do_not_depend_on_the_others(lengths: list[int], width: int, dtype: torch.dtype) -> None:
    offsets = offsets_of(lengths)
    values = torch.randn(int(offsets[-1]), width).to(dtype)
    together = k.segment_sum(values, offsets)
    for s, row in enumerate(values.split(lengths)):
        alone = k.segment_sum(row, torch.tensor([0, len(row)]))
        torch.testing.assert_close(alone[0], together[s], rtol=0, atol=0)
        torch.testing.assert_close(alone[0].double(), row.double().sum(0), rtol=2e-2, atol=2e-1)


def test_the_tree_adds_neighbours_first() -> None:
    big, small = 2.0**24, 1.0  # big + small == big in float32
    values = torch.tensor([[big], [small], [small], [small]])
    assert k.segment_sum(values, torch.tensor([0, 4])).item() == big + 2.0
    assert k.segment_sum(values, torch.tensor([0, 3])).item() == big
    assert k.segment_sum(values, torch.tensor([0, 3]), index=torch.tensor([1, 2, 0])).item() == big + 2.0


def test_a_segment_of_a_million_rows_is_summed() -> None:
    out = k.segment_sum(torch.ones(1_000_001, 1), torch.tensor([0, 1_000_001, 1_000_001]))
    assert out.flatten().tolist() == [1_000_001.0, 0.0]


def test_segment_sum_has_the_gradient_of_a_sum() -> None:
    values = torch.randn(9, 3, dtype=torch.float64, requires_grad=True)
    offsets, index = torch.tensor([0, 4, 4, 7]), torch.tensor([0, 2, 2, 8, 1, 0, 5])
    assert torch.autograd.gradcheck(lambda v: k.segment_sum(v, offsets, index=index), (values,))


@given(st.lists(st.integers(0, 20)), st.lists(st.integers(0, 20)))
def test_collisions_are_the_common_ids(ids: list[int], other: list[int]) -> None:
    found = k.collision_split(torch.tensor(ids, dtype=torch.int64), torch.tensor(other, dtype=torch.int64))
    assert found.tolist() == [i in other for i in ids]


def test_merged_rows_and_their_gradients_come_from_the_right_source() -> None:
    first = torch.randn(3, 2, dtype=torch.float64, requires_grad=True)
    second = torch.randn(2, 2, dtype=torch.float64, requires_grad=True)
    source = torch.tensor([2, ~1, 0, 2, ~0])
    out = k.merge_rows(first, second, source)
    expected = torch.stack([first[2], second[1], first[0], first[2], second[0]])
    torch.testing.assert_close(out, expected, rtol=0, atol=0)
    assert torch.autograd.gradcheck(lambda a, b: k.merge_rows(a, b, source), (first, second))


def updates(width: int, dtype: torch.dtype):
    acc = torch.float64 if dtype == torch.float64 else torch.float32
    torch.manual_seed(width)
    weight = torch.randn(40, width).to(dtype)

    def sgd(w, s, rows, g):
        k.sgd_update_(w, rows, g, lr=0.1)

    def adagrad(w, s, rows, g):
        k.adagrad_update_(w, s[0], rows, g, lr=0.1, eps=1e-8)

    def rowwise(w, s, rows, g):
        k.rowwise_adagrad_update_(w, s[1], rows, g, lr=0.1, eps=1e-8)

    def adam(w, s, rows, g):
        k.adam_update_(w, s[0], s[2], rows, g, lr=0.1, beta1=0.9, beta2=0.999, eps=1e-8, step=3)

    state = [torch.rand(40, width, dtype=acc), torch.rand(40, dtype=acc), torch.rand(40, width, dtype=acc)]
    return weight, state, {"sgd": sgd, "adagrad": adagrad, "rowwise_adagrad": rowwise, "adam": adam}


@pytest.mark.parametrize("name", ["sgd", "adagrad", "rowwise_adagrad", "adam"])
@given(widths, dtypes, st.integers(0, 33))
@settings(max_examples=60)
def test_updating_rows_in_two_calls_gives_the_bits_of_one(name: str, width: int, dtype: torch.dtype, cut: int) -> None:
    weight, state, steps = updates(width, dtype)
    rows, grad = torch.randperm(40)[:33], torch.randn(33, width).to(dtype)
    once, twice = (weight.clone(), [s.clone() for s in state]), (weight.clone(), [s.clone() for s in state])
    steps[name](*once, rows, grad)
    steps[name](*twice, rows[:cut], grad[:cut])
    steps[name](*twice, rows[cut:], grad[cut:])
    torch.testing.assert_close(once, twice, rtol=0, atol=0)
    assert not torch.equal(once[0][rows], weight[rows])


@pytest.mark.parametrize(("name", "reference"), [("sgd", torch.optim.SGD), ("adagrad", torch.optim.Adagrad)])
def test_updates_are_those_of_torch_optim(name: str, reference: type) -> None:
    weight, state, steps = updates(8, torch.float64)
    parameter = torch.nn.Parameter(weight.clone())
    optimizer = reference([parameter], lr=0.1)
    state[0].zero_()
    for _ in range(3):
        grad = torch.randn_like(weight)
        parameter.grad = grad.clone()
        optimizer.step()
        steps[name](weight, state, torch.arange(40), grad)
    torch.testing.assert_close(weight, parameter.detach(), rtol=1e-6, atol=1e-6)


def test_adam_is_that_of_torch_optim() -> None:
    weight = torch.randn(5, 4, dtype=torch.float64)
    parameter = torch.nn.Parameter(weight.clone())
    optimizer = torch.optim.Adam([parameter], lr=0.1)
    m, v = torch.zeros_like(weight), torch.zeros_like(weight)
    for step in (1, 2, 3):
        grad = torch.randn_like(weight)
        parameter.grad = grad.clone()
        optimizer.step()
        k.adam_update_(weight, m, v, torch.arange(5), grad, lr=0.1, beta1=0.9, beta2=0.999, eps=1e-8, step=step)
    torch.testing.assert_close(weight, parameter.detach())


def test_wrong_arguments_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    row = torch.zeros(1, dtype=torch.int64)
    with pytest.raises(ValueError, match="offsets must be"):
        k.jagged_permute(torch.zeros(3), torch.zeros(2), row)
    with pytest.raises(ValueError, match="grad \\(K, 4\\)"):
        k.sgd_update_(torch.zeros(3, 4), row, torch.zeros(1, 3), lr=0.1)
    monkeypatch.setattr("fs_kernels._dispatch.INTERPRET", False)
    with pytest.raises(ValueError, match="impl='triton' needs CUDA"):
        k.jagged_permute(torch.zeros(3, 4), torch.tensor([0, 3]), row, impl="triton")
