"""Checkpoints go from prioritized tables into TorchRec's modules and back, optimizer state included, on other ranks."""

import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver

import fs_embed
from tests.ranks import RankPool

pytest.importorskip("torchrec")
from tests.fs_embed.test_torchrec import LR, ROWS, Model, distribute, train, whole

ROW_WISE = dict.fromkeys(ROWS, "row_wise")
THEIRS = ROW_WISE | {"users": "table_wise", "places": "table_wise"}  # TorchRec has no row-wise bags on the CPU


class Swapped:
    """A model whose collections were swapped by `prioritize`, with what tests use of a distributed one."""

    def __init__(self, model: Model) -> None:
        self.module = fs_embed.prioritize(model, optimizer=fs_embed.RowWiseAdagrad(lr=LR), timeout_s=30.0)
        self.fused_optimizer = fs_embed.TableOptimizers(self.module)

    def __call__(self, batch: Any) -> Any:
        return self.module(batch)


def make(kind: str, seed: int) -> tuple[Any, Any]:
    """A model, and the module whose state is saved."""
    torch.manual_seed(seed)
    if kind == "swapped":
        swapped = Swapped(Model())
        return swapped, swapped.module
    if kind == "unsharded":
        model = Model()
        return model, model
    prioritized = kind == "sharder"
    model = distribute(Model(), ROW_WISE if prioritized else THEIRS, prioritized=prioritized)
    return model, model


def state_of(kind: str, model: Any, module: Any) -> dict[str, Any]:
    if kind == "unsharded":
        return {"model": module.state_dict()}
    return {"model": module.state_dict(), "tables": {"state": model.fused_optimizer.state_dict()["state"]}}


def save(kind: str, folder: str) -> dict[str, Tensor]:
    model, module = make(kind, seed=0)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*without having been prefetched")
        train(model, "plain", 4)
    state = state_of(kind, model, module)
    state_dict_saver.save(state, checkpoint_id=Path(folder))
    return whole(state)


def load(kind: str, folder: str) -> dict[str, Tensor]:
    model, module = make(kind, seed=7)
    state = state_of(kind, model, module)
    state_dict_loader.load(state, checkpoint_id=Path(folder))
    module.load_state_dict(state["model"])
    if "tables" in state:
        model.fused_optimizer.load_state_dict(state["tables"])
    return whole(state_of(kind, model, module))


def check(ranks: Callable[[int], RankPool], source: str, target: str, world_size: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        saved = ranks(2).run(save, source, folder, timeout_s=120)[0]
        assert any(name.endswith("item.momentum1") and value.any() for name, value in saved.items())
        for found in ranks(world_size).run(load, target, folder, timeout_s=120):
            assert set(found) == {name for name in saved if target != "unsharded" or name.startswith("model/")}
            assert all(torch.equal(value, saved[name]) for name, value in found.items())


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("ours", ["swapped", "sharder"])
def test_prioritized_tables_load_into_torchrecs(ranks: Callable[[int], RankPool], ours: str, world_size: int) -> None:
    check(ranks, ours, "torchrec", world_size)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("ours", ["swapped", "sharder"])
def test_torchrecs_tables_load_into_prioritized(ranks: Callable[[int], RankPool], ours: str, world_size: int) -> None:
    check(ranks, "torchrec", ours, world_size)


@pytest.mark.parametrize("ours", ["swapped", "sharder"])
def test_prioritized_tables_load_into_unsharded_modules(ranks: Callable[[int], RankPool], ours: str) -> None:
    check(ranks, ours, "unsharded", 1)


def test_swapped_and_sharded_tables_load_into_each_other(ranks: Callable[[int], RankPool]) -> None:
    check(ranks, "swapped", "sharder", 3)
    check(ranks, "sharder", "swapped", 3)


def _in_memory() -> tuple[bool, str]:
    """TorchRec's state given straight to a prioritized model: row-wise shards fit, others are refused."""
    _, source = make("torchrec", seed=0)
    _, target = make("swapped", seed=7)
    state = source.state_dict()
    sequences = {name: value for name, value in state.items() if "embeddings" in name and "bags" not in name}
    target.load_state_dict(sequences, strict=False)
    found, expected = whole(target.state_dict()), whole(state)
    text = "no error"
    try:
        target.load_state_dict({name: value for name, value in state.items() if "users" in name}, strict=False)
    except RuntimeError as error:
        text = str(error)
    return all(torch.equal(found[name], expected[name]) for name in sequences), text


def test_torchrecs_shards_load_without_a_file_where_they_are_ours(ranks: Callable[[int], RankPool]) -> None:
    for equal, text in ranks(2).run(_in_memory, timeout_s=120):
        assert equal
        assert "table 'users' must come with this rank's rows" in text
        assert "torch.distributed.checkpoint" in text
