"""Prioritized training gives the bits of synchronous training: losses of every step, and the table at the end."""

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

import fs_embed
from tests.fs_embed.training import NUM_ROWS, Run, batches, loss_of, make_model, train
from tests.ranks import RankPool

OPTIMIZERS = {
    "sgd": fs_embed.SGD(lr=0.05),
    "adagrad": fs_embed.Adagrad(lr=0.1),
    "rowwise_adagrad": fs_embed.RowWiseAdagrad(lr=0.1),
    "adam": fs_embed.Adam(lr=0.02),
}


def same_bits(a: Run, b: Run) -> bool:
    return a.losses == b.losses and torch.equal(a.table, b.table)


def _both(name: str, num_lookups: int, announce: str) -> tuple[Run, Run]:
    optimizer = OPTIMIZERS[name]
    return (
        train("synchronous", optimizer, num_lookups=num_lookups),
        train("prioritized", optimizer, num_lookups=num_lookups, announce=announce),
    )


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_prioritized_gives_the_bits_of_synchronous(
    ranks: Callable[[int], RankPool], world_size: int, name: str
) -> None:
    for expected, found in ranks(world_size).run(_both, name, 1, "all"):
        assert same_bits(expected, found)


@pytest.mark.parametrize("announce", ["all", "none", "odd"])
def test_several_lookups_and_missed_batches_keep_the_bits(ranks: Callable[[int], RankPool], announce: str) -> None:
    for expected, found in ranks(2).run(_both, "rowwise_adagrad", 3, announce):
        assert same_bits(expected, found)


def _plain(num_steps: int) -> Run:
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    losses: list[float] = []
    for step, lookups in enumerate(batches(0, num_steps)):
        loss = loss_of([model.table(ids) for ids in lookups], step)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return Run(losses, model.table.weight.detach())


def test_one_process_trains_as_nn_embedding_does() -> None:
    found, expected = train("prioritized", OPTIMIZERS["sgd"]), _plain(50)
    # Sums of at most 30 gradients in another order, amplified over 50 steps.
    torch.testing.assert_close(found.table, expected.table, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(torch.tensor(found.losses), torch.tensor(expected.losses), rtol=1e-4, atol=1e-4)


def _bad_id() -> str:
    model = fs_embed.prioritize(make_model(), optimizer=fs_embed.SGD(lr=0.1), timeout_s=20.0)
    ids = torch.tensor([1, 99 if dist.get_rank() == 1 else 2])
    try:
        model.table.prefetch([ids])
        model.table(ids)
    except fs_embed.IdOutOfRange as error:
        return str(error)
    return "no error"


def test_an_id_outside_the_table_is_an_error_on_every_rank(ranks: Callable[[int], RankPool]) -> None:
    for text in ranks(2).run(_bad_id):
        assert f"from 0 to {NUM_ROWS - 1} in table 'table': rank 1 got 99" in text


def _evaluate_in_between() -> tuple[bool, bool]:
    optimizer = OPTIMIZERS["rowwise_adagrad"]
    expected = train("synchronous", optimizer, num_steps=10)
    model = fs_embed.prioritize(make_model(), optimizer=optimizer, timeout_s=30.0)
    table, todo = model.table, batches(dist.get_rank(), 10)
    losses: list[float] = []
    table.prefetch(todo[0])
    for step in range(10):
        table.prefetch(todo[step + 1] if step < 9 else None)
        loss = loss_of([table(ids) for ids in todo[step]], step)
        loss.backward()
        losses.append(float(loss.detach()))
        model.eval()
        with torch.no_grad():
            seen = table(torch.arange(NUM_ROWS))
        model.train()
        assert torch.equal(seen, model.state_dict()["table.weight"].full_tensor())
    return losses == expected.losses, table.stats()["misses"] == 0


def test_evaluating_in_between_sees_every_update_and_changes_nothing(ranks: Callable[[int], RankPool]) -> None:
    assert ranks(2).run(_evaluate_in_between) == [(True, True)] * 2


def _second_backward() -> str:
    model = fs_embed.prioritize(make_model(), optimizer=fs_embed.SGD(lr=0.1), timeout_s=20.0)
    rows = model.table(torch.tensor([1]))
    rows.sum().backward(retain_graph=True)
    try:
        rows.sum().backward()
    except fs_embed.ClosedStep as error:
        return str(error)
    return "no error"


def test_a_second_backward_through_a_step_is_an_error() -> None:
    with pytest.warns(UserWarning, match="without having been prefetched"):
        assert "one backward" in _second_backward()
