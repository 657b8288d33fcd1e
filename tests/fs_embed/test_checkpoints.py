"""Checkpoints at any step, on any number of ranks."""

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import checkpoint
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver

import fs_embed
from tests.fs_embed.training import batches, loss_of, make_model
from tests.ranks import RankPool

STEPS, SAVE_AFTER = 12, 5


def _whole(state: dict[str, Any]) -> dict[str, Tensor]:
    """Every tensor of a nested state, by path, of all ranks."""
    out: dict[str, Tensor] = {}
    for key, value in state.items():
        if isinstance(value, dict):
            out |= {f"{key}/{name}": v for name, v in _whole(value).items()}
        else:
            out[key] = value.full_tensor() if hasattr(value, "full_tensor") else value.clone()
    return out


def _run(first: int, folder: str | None, *, save: str | None = None) -> tuple[list[float], dict[str, Tensor]]:
    """Trains steps `first` to STEPS; loads from `folder` before, or saves into `save` with updates in flight."""
    model = fs_embed.prioritize(make_model(seed=first), optimizer=fs_embed.Adam(lr=0.02), timeout_s=30.0)
    tables = fs_embed.TableOptimizers(model)
    if folder is not None:
        values = {"model": model.state_dict(), "tables": tables.state_dict()}
        state_dict_loader.load(values, checkpoint_id=Path(folder))
        model.load_state_dict(values["model"])
        tables.load_state_dict(values["tables"])
    todo = batches(dist.get_rank(), STEPS)
    losses: list[float] = []
    saving: Any = None
    model.table.prefetch(todo[first])
    for step in range(first, STEPS):
        model.table.prefetch(todo[step + 1] if step + 1 < STEPS else None)
        loss = loss_of([model.table(ids) for ids in todo[step]], step)
        loss.backward()
        losses.append(float(loss.detach()))
        if save and step + 1 == SAVE_AFTER:
            values = {"model": model.state_dict(), "tables": tables.state_dict()}
            if save.endswith("async"):
                saving = state_dict_saver.async_save(values, checkpoint_id=Path(save))  # while training goes on
            else:
                state_dict_saver.save(values, checkpoint_id=Path(save))
    whole = _whole(model.state_dict()) | _whole(tables.state_dict())
    if saving is not None:
        saving.result(timeout=60)
    model.table.close()
    return losses, whole


def _resume_is_exact(folder: str) -> bool:
    losses, whole = _run(0, None, save=folder)
    resumed, found = _run(SAVE_AFTER, folder)
    return losses[SAVE_AFTER:] == resumed and all(torch.equal(v, found[k]) for k, v in whole.items())


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_resuming_gives_the_bits_of_an_uninterrupted_run(ranks: Callable[[int], RankPool], kind: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        assert ranks(2).run(_resume_is_exact, f"{folder}/{kind}") == [True, True]


def _save(folder: str) -> dict[str, Tensor]:
    model = fs_embed.prioritize(make_model(), optimizer=fs_embed.Adam(lr=0.02), timeout_s=30.0)
    tables = fs_embed.TableOptimizers(model)
    todo = batches(dist.get_rank(), 4)
    model.table.prefetch(todo[0])
    for step in range(3):
        model.table.prefetch(todo[step + 1])
        loss_of([model.table(ids) for ids in todo[step]], step).backward()
    values = {"model": model.state_dict(), "tables": tables.state_dict()}
    state_dict_saver.save(values, checkpoint_id=Path(folder))
    return _whole(values["model"]) | _whole(values["tables"])


def _load(folder: str) -> dict[str, Tensor]:
    model = fs_embed.prioritize(make_model(seed=7), optimizer=fs_embed.Adam(lr=0.02), timeout_s=30.0)
    tables = fs_embed.TableOptimizers(model)
    values = {"model": model.state_dict(), "tables": tables.state_dict()}
    checkpoint.load(values, checkpoint_id=Path(folder))
    model.load_state_dict(values["model"])
    tables.load_state_dict(values["tables"])
    return _whole(model.state_dict()) | _whole(tables.state_dict())


@pytest.mark.parametrize("world_size", [1, 3, 4])
def test_a_checkpoint_of_two_ranks_loads_on_others(ranks: Callable[[int], RankPool], world_size: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        saved = ranks(2).run(_save, folder)[0]
        for found in ranks(world_size).run(_load, folder):
            assert set(found) == set(saved)
            assert all(torch.equal(value, found[name]) for name, value in saved.items())


def _back_and_forth() -> bool:
    model = fs_embed.prioritize(make_model(), optimizer=fs_embed.SGD(lr=0.1), timeout_s=30.0)
    expected = make_model().table.weight
    fs_embed.unprioritize(model)
    return torch.equal(model.table.weight, expected) and isinstance(model.table, torch.nn.Embedding)


def test_unprioritize_puts_the_whole_table_back(ranks: Callable[[int], RankPool]) -> None:
    assert ranks(3).run(_back_and_forth) == [True] * 3
