"""The loader inside other people's loops: each recipe of docs/fs_data.md, against one process on the whole batch."""

import contextlib
import os
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

from fs_data import BalancedDataLoader
from tests.fs_data.batches import Batches, Users, make_batch, rank_here, users_of, zigzag
from tests.ranks import RankPool

Ranks = Callable[[int], RankPool]
SIZES = [[5, 3, 6], [1, 2, 4], [7, 0, 3], [2, 1, 3]]


def balanced(loader: Any, **options: Any) -> BalancedDataLoader[Any]:
    return BalancedDataLoader(loader, **{"partitioner": zigzag, "timeout_s": 20.0, "weights": WEIGHTS} | options)


def tokens(batch: Any) -> Tensor:
    return batch["seq"].lengths


def clicks(batch: Any) -> Tensor:
    """Weights of a second task, some of them 0."""
    return (batch["user"] % 3).double()


WEIGHTS = {"tokens": tokens, "clicks": clicks}


class TwoTasks(nn.Module):
    """Sequence model with two heads, in float64: `(B,)` losses of both tasks."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.first, self.second = nn.Linear(2, 4), nn.Linear(4, 1), nn.Linear(4, 1)
        self.double()

    def forward(self, batch: Any) -> tuple[Tensor, Tensor]:
        pooled = torch.segment_reduce(batch["seq"].values.double(), "sum", lengths=tokens(batch), initial=0.0)
        x = torch.tanh(self.body(torch.stack([pooled / 1e4, (batch["user"] % 7).double()], dim=1)))
        return self.first(x)[:, 0] ** 2, self.second(x)[:, 0].cosh()


def weighted_mean(losses: Tensor, weights: Tensor) -> Tensor:
    return (losses * weights).sum() / weights.sum().clamp(min=1e-300)


def global_loss(model: nn.Module, loader: BalancedDataLoader[Any], batch: Any) -> Tensor:
    """The recipe: each task's mean over this rank's weights, scaled so that the average over ranks is the true mean."""
    first, second = model(batch)
    return weighted_mean(first, tokens(batch).double()) * loader.loss_scale(batch, "tokens") + weighted_mean(
        second, clicks(batch)
    ) * loader.loss_scale(batch, "clicks")


def alone(sizes: Sequence[Sequence[int]], lr: float = 0.05) -> tuple[list[float], dict[str, Tensor]]:
    """One process on each step's union: losses and final weights."""
    model = TwoTasks()
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    losses: list[float] = []
    for step in range(max(map(len, sizes))):
        union = make_batch(
            [1000 * r + sum(s[:step]) + i for r, s in enumerate(sizes) if step < len(s) for i in range(s[step])]
        )
        first, second = model(union)
        loss = weighted_mean(first, tokens(union).double()) + weighted_mean(second, clicks(union))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses, {k: v.detach() for k, v in model.state_dict().items()}


def assert_as_alone(losses: list[float], weights: dict[str, Tensor], sizes: Sequence[Sequence[int]]) -> None:
    """To 1e-10: only the order of additions differs."""
    wanted_losses, wanted = alone(sizes)
    torch.testing.assert_close(losses, wanted_losses, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(dict(weights), wanted, rtol=1e-10, atol=1e-12)


def mean_over_ranks(loss: Tensor) -> float:
    total = loss.detach().clone()
    dist.all_reduce(total)
    return float(total) / dist.get_world_size()


# ---- plain PyTorch --------------------------------------------------------------------------------------------------


def _ddp(sizes: list[list[int]]) -> None:
    model = DistributedDataParallel(TwoTasks())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    losses: list[float] = []
    with balanced(Batches(sizes[rank_here()])) as loader:
        for batch in loader:
            loss = global_loss(model, loader, batch)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(mean_over_ranks(loss))
    assert_as_alone(losses, model.module.state_dict(), sizes)


@pytest.mark.parametrize("sizes", [SIZES[:2], SIZES[:3], SIZES, [[3, 2], [1]], [[2, 1, 1], [1, 1], [1]]])
def test_ddp_trains_as_one_process_does(ranks: Ranks, sizes: list[list[int]]) -> None:
    ranks(len(sizes)).run(_ddp, sizes)


def _fsdp2(sizes: list[list[int]]) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor

    model = TwoTasks()
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    losses: list[float] = []
    with balanced(Batches(sizes[rank_here()])) as loader:
        for batch in loader:
            loss = global_loss(model, loader, batch)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(mean_over_ranks(loss))
    weights = {k: v.full_tensor() if isinstance(v, DTensor) else v for k, v in model.state_dict().items()}
    assert_as_alone(losses, weights, sizes)


def test_fsdp2_trains_as_one_process_does(ranks: Ranks) -> None:
    ranks(2).run(_fsdp2, SIZES[:2])


def _titan(folder: str) -> None:
    """A torchtitan-like loop: the loader is one of the checkpoint's Stateful objects, saved and loaded by DCP."""
    import torch.distributed.checkpoint as dcp

    def make() -> BalancedDataLoader[Any]:
        users = Users(24 if rank_here() == 0 else 18)
        return balanced(StatefulDataLoader(users, batch_size=3, collate_fn=make_batch, num_workers=1))

    def train(loader: BalancedDataLoader[Any], steps: int) -> list[list[int]]:
        seen: list[list[int]] = []
        data = iter(loader)
        for _ in range(steps):
            try:
                seen.append(next(data)["user"].tolist())
            except StopIteration:
                break
            step = len(seen)
            if step in (3, 7):
                dcp.save({"dataloader": loader}, checkpoint_id=f"{folder}/step{step}")
        return seen

    with make() as loader:
        whole = train(loader, 100)
    assert len(whole) == 8
    for step in (3, 7):
        with make() as loader:
            dcp.load({"dataloader": loader}, checkpoint_id=f"{folder}/step{step}")
            assert train(loader, 100) == whole[step:]
        dist.barrier()


def test_a_checkpoint_of_a_titan_like_loop_resumes_each_rank_where_it_was(ranks: Ranks, tmp_path: Path) -> None:
    ranks(2).run(_titan, str(tmp_path))


def _train_and_evaluate() -> tuple[list[int], list[int]]:
    """Two loaders alive at once: an evaluation in the middle of a pass over the training data."""
    with balanced(Batches([2] * 6)) as training, balanced(Batches([3] * 2)) as evaluation:
        train: list[int] = []
        evaluated: list[int] = []
        for step, batch in enumerate(training):
            train += batch["user"].tolist()
            if step in (1, 4):
                evaluated += [u for users in users_of(evaluation) for u in users]
        return train, evaluated


def test_training_and_evaluation_loaders_live_side_by_side(ranks: Ranks) -> None:
    (train0, eval0), (train1, eval1) = ranks(2).run(_train_and_evaluate)
    assert sorted(train0 + train1) == [*range(12), *range(1000, 1012)]
    assert sorted(eval0 + eval1) == sorted([*range(6), *range(1000, 1006)] * 2)


# ---- trainers -------------------------------------------------------------------------------------------------------


def _accelerate() -> list[list[int]]:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    inner = DataLoader(Users(24, rank=0), batch_size=3, collate_fn=make_batch, shuffle=True)
    model, optimizer, inner = accelerator.prepare(model, optimizer, inner)
    seen: list[list[int]] = []
    with balanced(inner) as loader:  # wrap after prepare, which rebuilds loaders
        assert len(loader) == 4
        loader.set_epoch(1)
        for batch in loader:
            loss = model(batch["user"][:, None].float()).mean() * loader.loss_scale(batch)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            seen.append(batch["user"].tolist())
    return seen


def test_accelerate(ranks: Ranks) -> None:
    pytest.importorskip("accelerate")
    found = ranks(2).run(_accelerate)
    assert [len(seen) for seen in found] == [4, 4]
    assert sorted(u for seen in found for users in seen for u in users) == list(range(24))


def _as_torchrun() -> None:
    """Lightning recognises processes that a launcher started by this variable."""
    os.environ["TORCHELASTIC_RUN_ID"] = "test"
    os.environ["GROUP_RANK"] = "0"
    warnings.simplefilter("ignore")


def _fabric() -> list[int]:
    from lightning.fabric import Fabric

    _as_torchrun()
    fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp")
    fabric.launch()
    model = TwoTasks()
    model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.05))
    seen: list[int] = []
    with balanced(Batches(SIZES[rank_here()])) as loader:
        for batch in loader:
            optimizer.zero_grad()
            fabric.backward(global_loss(model, loader, batch))
            optimizer.step()
            seen += batch["user"].tolist()
    assert_as_alone(alone(SIZES[:2])[0], model.module.state_dict(), SIZES[:2])
    return seen


def test_lightning_fabric_trains_as_one_process_does(ranks: Ranks) -> None:
    pytest.importorskip("lightning")
    ranks(2).run(_fabric, timeout_s=120)


def _trainer() -> None:
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self, loader: BalancedDataLoader[Any]) -> None:
            super().__init__()
            self.model, self.loader = TwoTasks(), loader

        def training_step(self, batch: Any, _: int) -> Tensor:
            return global_loss(self.model, self.loader, batch)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.05)

    _as_torchrun()
    with tempfile.TemporaryDirectory() as folder, balanced(Batches(SIZES[rank_here()])) as loader:
        trainer = lightning.Trainer(
            accelerator="cpu", devices=2, strategy="ddp", max_epochs=1, logger=False, enable_checkpointing=False,
            enable_progress_bar=False, enable_model_summary=False, use_distributed_sampler=False,
            default_root_dir=folder,
        )  # fmt: skip
        module = Module(loader)
        trainer.fit(module, loader)
        assert trainer.global_step == 3
    assert_as_alone(alone(SIZES[:2])[0], module.model.state_dict(), SIZES[:2])


def test_lightning_trainer_trains_as_one_process_does(ranks: Ranks) -> None:
    pytest.importorskip("lightning")
    ranks(2).run(_trainer, timeout_s=120)
    ranks(2).close()  # Lightning leaves its mark on a process


def _torchrec(name: str) -> list[int]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
        from torchrec.distributed import DistributedModelParallel, TrainPipelineBase, TrainPipelineSparseDist
        from torchrec.streamable import Pipelineable

        @dataclass
        class RecBatch(Pipelineable):
            keyed: Any
            label: Tensor

            def to(self, device: torch.device, non_blocking: bool = False) -> "RecBatch":
                return RecBatch(*(x.to(device, non_blocking=non_blocking) for x in (self.keyed, self.label)))

            def record_stream(self, stream: torch.Stream) -> None:
                self.keyed.record_stream(stream)
                self.label.record_stream(stream)

            def pin_memory(self) -> "RecBatch":
                return RecBatch(self.keyed.pin_memory(), self.label.pin_memory())

        def make(ids: Sequence[int]) -> RecBatch:
            lengths = torch.tensor([1 + i % 3 for i in ids])
            user = torch.tensor(ids)
            keyed = KeyedJaggedTensor(["item"], user.repeat_interleave(lengths) % 50, lengths=lengths)
            return RecBatch(keyed, user)

        class Model(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                config = EmbeddingBagConfig(name="item", embedding_dim=8, num_embeddings=50, feature_names=["item"])
                self.tables = EmbeddingBagCollection(tables=[config], device=torch.device("meta"))
                self.head = nn.Linear(8, 1)

            def forward(self, batch: RecBatch) -> tuple[Tensor, Tensor]:
                x = self.tables(batch.keyed).values()
                loss = self.head(x).mean()
                return loss, loss.detach()

        def checked(loader: Any) -> Iterator[RecBatch]:
            for batch in loader:
                users = batch.label.tolist()
                assert batch.keyed.values().tolist() == [u % 50 for u in users for _ in range(1 + u % 3)]
                seen.extend(users)
                yield batch

        seen: list[int] = []
        device = torch.device("cpu")
        model = DistributedModelParallel(Model(), device=device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        first = 1000 * rank_here()
        batches = [make(range(first + 3 * i, first + 3 * i + 3)) for i in range(5 + rank_here())]
        kind = {"base": TrainPipelineBase, "sparse": TrainPipelineSparseDist}[name]
        with balanced(batches, weights=None, device=device) as loader:
            pipeline, data = kind(model, optimizer, device), checked(loader)
            with contextlib.suppress(StopIteration):
                while True:
                    pipeline.progress(data)
    return seen


@pytest.mark.parametrize("name", ["base", "sparse"])
def test_torchrec_pipelines_see_every_sample_once(ranks: Ranks, name: str) -> None:
    pytest.importorskip("torchrec")
    first, second = ranks(2).run(_torchrec, name, timeout_s=120)
    assert sorted(first + second) == [*range(15), *range(1000, 1018)]
