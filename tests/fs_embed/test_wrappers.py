"""DDP, FSDP2, clipping and dense optimizers around prioritized tables leave every shard as it should be."""

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import fs_embed
from tests.ranks import RankPool

DIM = 4


class Tower(nn.Module):
    def __init__(self, num_rows: int) -> None:
        super().__init__()
        self.table = nn.Embedding(num_rows, DIM)
        self.dense = nn.Linear(DIM, 1)

    def forward(self, ids: Tensor) -> Tensor:
        return self.dense(self.table(ids)).tanh().mean()


def _train(wrapper: str, num_rows: int) -> Tensor:
    torch.manual_seed(0)
    model = fs_embed.prioritize(Tower(num_rows), optimizer=fs_embed.RowWiseAdagrad(lr=0.1), timeout_s=30.0)
    with torch.no_grad():  # shards that differ between ranks, so that a broadcast would show
        model.table.tables.stores[0].weight.add_(dist.get_rank())
    inner: nn.Module = model
    if wrapper == "ddp":
        inner = DistributedDataParallel(model)
    elif wrapper == "fsdp2":
        fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer = torch.optim.SGD([p for p in inner.parameters() if p.requires_grad], lr=0.1)
    g = torch.Generator().manual_seed(dist.get_rank())
    todo = [torch.randint(num_rows, (6,), generator=g) for _ in range(6)]
    model.table.prefetch([todo[0]])
    for now, after in zip(todo, [*todo[1:], None], strict=True):
        model.table.prefetch(None if after is None else [after])
        loss = inner(now)
        loss.backward()
        if wrapper == "none":  # what the wrappers do
            for p in model.parameters():
                dist.all_reduce(p.grad)
                p.grad /= dist.get_world_size()
        torch.nn.utils.clip_grad_norm_(inner.parameters(), 0.05)
        optimizer.step()
        optimizer.zero_grad()
    whole = model.table.state_dict()["weight"].full_tensor()
    model.table.close()
    return whole


def _compare(wrapper: str, num_rows: int) -> float:
    return float((_train(wrapper, num_rows) - _train("none", num_rows)).abs().max())


@pytest.mark.parametrize("wrapper", ["ddp", "fsdp2"])
@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize("num_rows", [12, 7])
def test_shards_train_on_as_without_the_wrapper(
    ranks: Callable[[int], RankPool], wrapper: str, world_size: int, num_rows: int
) -> None:
    for difference in ranks(world_size).run(_compare, wrapper, num_rows):
        assert difference < 1e-5  # the dense gradients are added in another order


def test_tables_are_no_parameters_and_have_no_weight_to_tie() -> None:
    model = fs_embed.prioritize(Tower(5), optimizer=fs_embed.SGD(lr=0.1))
    assert {name for name, _ in model.named_parameters()} == {"dense.weight", "dense.bias"}
    assert set(model.state_dict()) == {"table.weight", "dense.weight", "dense.bias"}
    with pytest.raises(AttributeError, match=r"no \.weight to use or tie"):
        model.table.weight  # noqa: B018
