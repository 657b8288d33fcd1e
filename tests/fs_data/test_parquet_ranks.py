"""Parquet on several ranks: what breaks on one is an error on all, and each rank's checkpoint is its own."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from fs_data import BalancedDataLoader
from fs_data.parquet import ParquetUIHDataset
from tests.fs_data.test_parquet import write
from tests.fs_data.test_parquet_faults import corrupt_group
from tests.ranks import RankFailure, RankPool

Ranks = Callable[[int], RankPool]


def _loader(folder: Path) -> BalancedDataLoader[Any]:
    from torchdata.stateful_dataloader import StatefulDataLoader

    dataset = ParquetUIHDataset(folder, batch_size=3)
    return BalancedDataLoader(StatefulDataLoader(dataset, batch_size=None), timeout_s=20.0)


def _read_all(folder: Path) -> list[int]:
    with _loader(folder) as loader:
        return [n for batch in loader for n in batch["user"].tolist()]


@pytest.mark.parametrize("world_size", [2, 3])
def test_a_broken_file_of_one_rank_is_named_on_all(ranks: Ranks, tmp_path: Path, world_size: int) -> None:
    for i in range(world_size):
        write(tmp_path / f"{i}.parquet", [6, 6], first=12 * i)
    corrupt_group(tmp_path / "1.parquet", 0)
    named = ".*".join(rf"rank {r}: .*1\.parquet, row group 0" for r in range(world_size))
    with pytest.raises(RankFailure, match=f"(?s){named}"):
        ranks(world_size).run(_read_all, tmp_path)


def _stop_and_go_on(folder: Path, checkpoint: Path) -> tuple[list[int], list[int]]:
    """Users before a checkpoint after two batches, and those that a new loader goes on with."""
    key = f"loader_{dist.get_rank()}"
    with _loader(folder) as loader:
        batches = iter(loader)
        before = [n for _ in range(2) for n in next(batches)["user"].tolist()]
        save({key: loader}, checkpoint_id=checkpoint)
    with _loader(folder) as loader:
        load({key: loader}, checkpoint_id=checkpoint)
        return before, [n for batch in loader for n in batch["user"].tolist()]


def test_a_checkpoint_holds_each_ranks_own_place(ranks: Ranks, tmp_path: Path) -> None:
    data, checkpoint = tmp_path / "data", tmp_path / "checkpoint"
    data.mkdir()
    rows = write(data / "h.parquet", [5] * 8)
    found = ranks(2).run(_stop_and_go_on, data, checkpoint)
    seen = [n for before, after in found for n in (*before, *after)]
    assert sorted(seen) == [user for user, _, _ in rows]
    assert all(len(before) == 6 for before, _ in found)
    assert torch.tensor([len(after) for _, after in found]).min() > 6
