"""A rank that leaves steps out: nobody hangs, and the tables are those of synchronous training."""

import itertools
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

import fs_embed
from tests.fs_embed.training import NUM_ROWS, batches, loss_of, make_model
from tests.ranks import RankPool


def _train(mode: str, absent: dict[int, str], num_steps: int = 12, ahead: int = 1) -> tuple[list[float], torch.Tensor]:
    """Rank 1 leaves steps out: "call" the module's call, "backward" the backward, "grad" runs under no_grad."""
    rank = dist.get_rank()
    model = fs_embed.prioritize(make_model(), optimizer=fs_embed.Adam(lr=0.02), mode=mode, timeout_s=20.0)  # type: ignore
    table, todo, losses = model.table, batches(rank, num_steps), []
    announced = iter([*todo, None])
    for _ in range(ahead):
        table.prefetch(next(announced))
    for step in range(num_steps):
        table.prefetch(next(announced, None))
        left_out = absent.get(step) if rank == 1 else None
        if left_out == "call":
            continue
        with torch.set_grad_enabled(left_out != "grad"):
            loss = loss_of([table(ids) for ids in todo[step]], step)
        losses.append(float(loss.detach()))
        if left_out is None:
            loss.backward()
    table.prefetch(None)
    whole = model.state_dict()["table.weight"].full_tensor()
    table.close()
    return losses, whole


def _both(absent: dict[int, str], ahead: int) -> tuple[bool, bool]:
    expected, found = _train("synchronous", absent), _train("prioritized", absent, ahead=ahead)
    return expected[0] == found[0], torch.equal(expected[1], found[1])


ABSENCES = {
    "one call": {4: "call"},
    "calls at both ends": {0: "call", 11: "call"},
    "many calls": dict.fromkeys(range(3, 8), "call"),
    "backwards": {2: "backward", 3: "backward", 11: "backward"},
    "gradients": {5: "grad"},
    "all kinds": {1: "call", 2: "backward", 3: "grad", 4: "call", 9: "backward", 10: "call"},
}


@pytest.mark.parametrize("name", ABSENCES)
def test_steps_that_a_rank_leaves_out_keep_the_bits(ranks: Callable[[int], RankPool], name: str) -> None:
    for found in ranks(2).run(_both, ABSENCES[name], 1):
        assert found == (True, True)


def test_a_loop_that_announces_further_ahead_is_recognised(ranks: Callable[[int], RankPool]) -> None:
    for found in ranks(2).run(_both, {}, 3):
        assert found == (True, True)


def _exception_everywhere() -> bool:
    tables = []
    for mode in ("synchronous", "prioritized"):
        model = fs_embed.prioritize(make_model(), optimizer=fs_embed.RowWiseAdagrad(lr=0.1), mode=mode, timeout_s=20.0)  # type: ignore
        todo = batches(dist.get_rank(), 8)
        model.table.prefetch(todo[0])
        for step, (now, after) in enumerate(itertools.pairwise([*todo, None])):
            model.table.prefetch(after)
            try:
                loss = loss_of([model.table(ids) for ids in now], step)
                if step == 3:
                    raise ZeroDivisionError
                loss.backward()
            except ZeroDivisionError:
                continue
        tables.append(model.state_dict()["table.weight"].full_tensor())
    return torch.equal(*tables)


def test_training_goes_on_after_an_exception_on_all_ranks(ranks: Callable[[int], RankPool]) -> None:
    assert ranks(2).run(_exception_everywhere) == [True, True]


def _not_finite() -> tuple[float, float, bool]:
    model = fs_embed.prioritize(make_model(), optimizer=fs_embed.Adam(lr=0.1), timeout_s=20.0)
    before = model.state_dict()["table.weight"].full_tensor()
    ids = torch.arange(NUM_ROWS)
    model.table.prefetch([ids])
    model.table.prefetch(None)
    rows = model.table(ids)
    (rows.sum() * (float("inf") if dist.get_rank() == 1 else 1.0)).backward()
    after = model.state_dict()["table.weight"].full_tensor()
    return model.table.stats()["skipped_updates"], model.table.tables.stores[0].num_steps, torch.equal(before, after)


def test_a_gradient_that_is_not_finite_on_one_rank_stops_the_update_on_all(ranks: Callable[[int], RankPool]) -> None:
    assert ranks(2).run(_not_finite) == [(1, 0, True)] * 2
