"""What the kernels on rows of embeddings are timed at: ids of a heavy-tailed batch, rows of 512 bytes.

A batch of 581,000 ids names 391,000 of 4 million rows, the hottest 13,000 times; other sizes have the
same shape.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

import fs_kernels
from benchmarks.kernel_case import Case

D = 128
ROW_BYTES = 4 * D
ROWS_AN_ID = 7
EXPONENT = 0.75
BETA1, BETA2, EPS, LR = 0.9, 0.999, 1e-8, 0.01


@dataclass(frozen=True)
class Batch:
    """Ids grouped: what a backward has in hand before it sums gradients and updates rows."""

    num_rows: int
    """Of the table."""
    ids: Tensor
    """`(K,)`."""
    rows: Tensor
    """`(U,)` distinct ids, ascending."""
    inverse: Tensor
    """`(K,)`: which of `rows` each id is."""
    places: Tensor
    """`(K,)` where they occur, grouped by id."""
    offsets: Tensor
    """`(U + 1,)`."""


def make_batch(num_ids: int) -> Batch:
    torch.manual_seed(0)
    num_rows = ROWS_AN_ID * num_ids
    ids = zipf_ids(num_ids, num_rows)
    in_order, places = ids.sort(stable=True)
    rows, counts = in_order.unique_consecutive(return_counts=True)
    offsets = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
    return Batch(num_rows, ids, rows, torch.searchsorted(rows, ids), places, offsets)


def zipf_ids(num_ids: int, num_rows: int) -> Tensor:
    """`(num_ids,)` from 0 to `num_rows - 1`: the i-th hottest about as often as `i ** -EXPONENT`."""
    drawn = torch.rand(num_ids, dtype=torch.float64, device="cuda") ** (1 / (1 - EXPONENT))
    rank = (drawn * num_rows).long().clamp(max=num_rows - 1)
    return rank * 1_000_003 % num_rows  # hot rows lie anywhere in the table


def row_cases(num_bytes: int) -> Iterator[Case]:
    num_rows = max(num_bytes // ROW_BYTES, 2)
    yield merge_case(num_rows)
    batch = make_batch(num_rows)
    yield segment_sum_case(batch)
    for make in (sgd_case, adagrad_case, rowwise_adagrad_case, adam_case):
        yield make(batch)
    del batch
    yield collision_case(max(num_bytes // 8, 2))


def merge_case(num_rows: int) -> Case:
    """Two thirds of the rows were there before, as an output that is merged in the order of its ids."""
    torch.manual_seed(0)
    num_first = num_rows * 2 // 3
    first, second = (torch.randn(n, D, device="cuda") for n in (num_first, num_rows - num_first))
    place = torch.randperm(num_rows, device="cuda")
    source = torch.where(place < num_first, place, ~(place - num_first))

    def in_torch() -> Tensor:
        return torch.cat([first, second]).index_select(0, torch.where(source < 0, num_first + ~source, source))

    return Case(
        kernel="merge_rows, random rows of 512 bytes",
        num_bytes=2 * num_rows * ROW_BYTES,
        ours=lambda: fs_kernels.merge_rows(first, second, source),
        torch=in_torch,
    )


def segment_sum_case(b: Batch) -> Case:
    values = torch.randint(-8, 9, (len(b.ids), D), device="cuda").float()  # whole: the same sums in every order
    return Case(
        kernel="segment_sum, Zipf ids",
        num_bytes=(len(b.ids) + len(b.rows)) * ROW_BYTES,
        ours=lambda: fs_kernels.segment_sum(values, b.offsets, index=b.places),
        torch=lambda: values.new_zeros(len(b.rows), D).index_add_(0, b.inverse, values),  # in an order left to chance
    )


def sgd_case(b: Batch) -> Case:
    weight, grad, rows = _table(b), _grad(b), b.rows
    return Case(
        kernel="sgd_update_, Zipf ids",
        num_bytes=3 * len(rows) * ROW_BYTES,
        ours=lambda: fs_kernels.sgd_update_(weight, rows, grad, lr=LR),
        torch=lambda: weight.index_add_(0, rows, grad, alpha=-LR),
    )


def adagrad_case(b: Batch) -> Case:
    weight, state, grad, rows = _table(b), _table(b).abs_(), _grad(b), b.rows

    def in_torch() -> None:
        s = torch.addcmul(state.index_select(0, rows), grad, grad)
        state.index_copy_(0, rows, s)
        weight.index_add_(0, rows, grad / s.sqrt_().add_(EPS), alpha=-LR)

    return Case(
        kernel="adagrad_update_, Zipf ids",
        num_bytes=5 * len(rows) * ROW_BYTES,
        ours=lambda: fs_kernels.adagrad_update_(weight, state, rows, grad, lr=LR, eps=EPS),
        torch=in_torch,
    )


def rowwise_adagrad_case(b: Batch) -> Case:
    weight, grad, rows = _table(b), _grad(b), b.rows
    state = torch.rand(b.num_rows, device="cuda")

    def in_torch() -> None:
        s = state.index_select(0, rows) + grad.square().mean(1)
        state.index_copy_(0, rows, s)
        weight.index_add_(0, rows, grad * s.sqrt_().add_(EPS).reciprocal_()[:, None], alpha=-LR)

    return Case(
        kernel="rowwise_adagrad_update_, Zipf ids",
        num_bytes=3 * len(rows) * ROW_BYTES,
        ours=lambda: fs_kernels.rowwise_adagrad_update_(weight, state, rows, grad, lr=LR, eps=EPS),
        torch=in_torch,
    )


def adam_case(b: Batch) -> Case:
    weight, exp_avg, exp_avg_sq, grad, rows = _table(b), _table(b), _table(b).abs_(), _grad(b), b.rows
    step = 3

    def in_torch() -> None:
        m = exp_avg.index_select(0, rows).lerp_(grad, 1 - BETA1)
        v = exp_avg_sq.index_select(0, rows).mul_(BETA2).addcmul_(grad, grad, value=1 - BETA2)
        exp_avg.index_copy_(0, rows, m)
        exp_avg_sq.index_copy_(0, rows, v)
        change = m.div_(v.div_(1 - BETA2**step).sqrt_().add_(EPS))
        weight.index_add_(0, rows, change, alpha=-LR / (1 - BETA1**step))

    def ours() -> None:
        fs_kernels.adam_update_(
            weight, exp_avg, exp_avg_sq, rows, grad, lr=LR, beta1=BETA1, beta2=BETA2, eps=EPS, step=step
        )

    return Case(kernel="adam_update_, Zipf ids", num_bytes=7 * len(rows) * ROW_BYTES, ours=ours, torch=in_torch)


def collision_case(num_ids: int) -> Case:
    """Two batches' ids, which a copy would move once; finding an id means at least one more look at random memory."""
    torch.manual_seed(0)
    ids, other = (zipf_ids(num_ids // 2, ROWS_AN_ID * num_ids) for _ in range(2))
    return Case(
        kernel="collision_split, Zipf ids",
        num_bytes=ids.numel() * (2 * ids.itemsize + 1),
        ours=lambda: fs_kernels.collision_split(ids, other),
        torch=lambda: torch.isin(ids, other),
    )


def _table(b: Batch) -> Tensor:
    return torch.randn(b.num_rows, D, device="cuda")


def _grad(b: Batch) -> Tensor:
    return torch.randn(len(b.rows), D, device="cuda")
