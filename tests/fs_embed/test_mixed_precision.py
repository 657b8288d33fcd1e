"""Loss scaling, autocast and activation checkpointing around prioritized tables."""

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fs_embed
from tests.fs_embed.training import DIM, NUM_ROWS, batches


class Tower(nn.Module):
    def __init__(self, recompute: str = "nothing") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.recompute = recompute
        self.table = nn.Embedding(NUM_ROWS, DIM)
        self.wide = nn.Embedding(NUM_ROWS, 2 * DIM)
        self.dense = nn.Sequential(nn.Linear(3 * DIM, 8), nn.Tanh(), nn.Linear(8, 1))

    def forward(self, ids: Tensor) -> Tensor:
        if self.recompute == "everything":
            return checkpoint(self.everything, ids, use_reentrant=False)  # type: ignore
        rows = torch.cat([self.table(ids), self.wide(ids)], -1)
        if self.recompute == "dense":
            return checkpoint(self.dense, rows, use_reentrant=False).mean()  # type: ignore
        if self.recompute == "dense, reentrant":
            return checkpoint(self.dense, rows, use_reentrant=True).mean()  # type: ignore
        return self.dense(rows).mean()

    def everything(self, ids: Tensor) -> Tensor:
        return self.dense(torch.cat([self.table(ids), self.wide(ids)], -1)).mean()


def train(model: Any, *, autocast: bool = False) -> dict[str, Tensor]:
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    todo: list[Tensor | None] = [ids[0] for ids in batches(0, 8) if len(ids[0])]
    tables = [m for _, m in fs_embed.prioritized_modules(model)]
    for table in tables:
        table.prefetch([todo[0]])
    for now, after in itertools.pairwise([*todo, None]):
        for table in tables:
            table.prefetch(None if after is None else [after])
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = model(now)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    for table in tables:
        table.close()
    return state


def prioritized(model: nn.Module, **options: Any) -> nn.Module:
    return fs_embed.prioritize(model, optimizer=fs_embed.SGD(lr=0.1), **options)


@pytest.mark.parametrize("recompute", ["dense", "dense, reentrant", "everything"])
def test_activation_checkpointing_changes_no_bit(recompute: str) -> None:
    expected, found = train(prioritized(Tower())), train(prioritized(Tower(recompute)))
    assert all(torch.equal(value, found[name]) for name, value in expected.items())


def test_autocast_learns_what_a_plain_model_learns_under_it() -> None:
    expected, found = train(Tower(), autocast=True), train(prioritized(Tower()), autocast=True)
    # Gradients of rows are added in float32 here, and in bfloat16 products there.
    torch.testing.assert_close(found, expected, rtol=1e-2, atol=1e-2)


def _scaled(overflow_in: str, mode: str) -> tuple[dict[str, Tensor], dict[str, Tensor], float]:
    """State before and after a step with a loss scale, in which a gradient overflows, and the scale after."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    model: Any = prioritized(Tower(), loss_scale=scaler.get_scale, mode=mode)
    faces = fs_embed.TableOptimizers(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    ids = torch.tensor([1, 2, 2])
    for table in (model.table, model.wide):
        table.prefetch([ids])
        table.prefetch(None)
    rows = torch.cat([model.table(ids), model.wide(ids)], -1)
    if overflow_in == "table":
        rows.register_hook(lambda grad: grad * float("inf"))
    loss = model.dense(rows).mean()
    scaler.scale(loss).backward()
    faces.spread_not_finite(optimizer)
    scaler.step(optimizer)
    scaler.update()
    after = {name: value.clone() for name, value in model.state_dict().items()}
    for table in (model.table, model.wide):
        table.close()
    return before, after, scaler.get_scale()


@pytest.mark.parametrize("mode", ["prioritized", "synchronous"])
def test_an_overflow_in_a_table_skips_the_dense_step_and_halves_the_scale(mode: str) -> None:
    before, after, scale = _scaled("table", mode)
    assert scale == 2.0**9
    assert all(torch.equal(value, after[name]) for name, value in before.items())


@pytest.mark.parametrize("mode", ["prioritized", "synchronous"])
def test_a_loss_scale_is_taken_out_of_the_update(mode: str) -> None:
    before, after, scale = _scaled("nothing", mode)
    assert scale == 2.0**10
    plain = Tower()
    ids = torch.tensor([1, 2, 2])
    plain.load_state_dict(before)
    plain(ids).backward()
    torch.optim.SGD(plain.parameters(), lr=0.1).step()
    torch.testing.assert_close(after, {name: value.detach() for name, value in plain.state_dict().items()})


def test_an_overflow_in_one_store_skips_all_stores_of_a_collection() -> None:
    tables = [fs_embed.TableConfig("a", 5, 2, ("a",)), fs_embed.TableConfig("b", 5, 3, ("b",))]
    module = fs_embed.PrioritizedEmbeddingCollection(tables, optimizer=fs_embed.SGD(lr=1.0))
    before = {name: value.clone() for name, value in module.state_dict().items()}
    ids = {"a": torch.tensor([1]), "b": torch.tensor([2])}
    module.prefetch([ids])
    module.prefetch(None)
    out = module(ids)
    (out["a"].values().sum() + out["b"].values().sum() * float("inf")).backward()
    after = module.state_dict()
    assert all(torch.equal(value, after[name]) for name, value in before.items())
    module.close()


def test_an_optimizer_that_holds_a_swapped_weight_is_refused_when_it_steps() -> None:
    model = Tower()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    prioritized(model)
    with pytest.raises(RuntimeError, match="holds the weight of 'table'"):
        optimizer.step()


def test_prioritizing_below_a_wrapper_is_refused() -> None:
    model = nn.Module()
    wrapper = nn.Module()
    wrapper.__class__ = type("FSDPTower", (torch.distributed.fsdp.FSDPModule, nn.Module), {})
    model.inner = wrapper
    model.inner.table = nn.Embedding(3, 2)
    with pytest.raises(ValueError, match="prioritize must come before"):
        prioritized(model)
