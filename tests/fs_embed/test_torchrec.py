"""Prioritized tables in `DistributedModelParallel`: placed by its planner, beside TorchRec's, under its pipelines."""

import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fs_embed
from tests.ranks import RankPool

torchrec = pytest.importorskip("torchrec")
streamable = pytest.importorskip("torchrec.streamable")

DIM, STEPS = 8, 12
FEATURES = ("seen", "liked", "word", "user", "place")
ROWS = {"item": 37, "words": 23, "users": 29, "places": 11}
ROW_WISE = {"item": "row_wise", "users": "row_wise"}
MIXED = ROW_WISE | {"words": "column_wise", "places": "table_wise"}
LR = 0.1


@dataclass
class Batch(streamable.Pipelineable):
    ids: Any
    label: Tensor

    def to(self, device: torch.device, non_blocking: bool = False) -> "Batch":
        return Batch(self.ids.to(device, non_blocking=non_blocking), self.label.to(device))

    def record_stream(self, stream: Any) -> None:
        self.ids.record_stream(stream)

    def pin_memory(self) -> "Batch":
        return self


class Model(nn.Module):
    """Sequence tables and pooled tables of several kinds of sharding, and a dense part; `forward` can be traced."""

    def __init__(self, device: str = "cpu") -> None:
        super().__init__()
        table = lambda config, name, *features, **kw: config(  # noqa: E731
            name=name, num_embeddings=ROWS[name], embedding_dim=DIM, feature_names=list(features), **kw
        )
        sequence, bag = torchrec.EmbeddingConfig, torchrec.EmbeddingBagConfig
        self.ec = torchrec.EmbeddingCollection(
            tables=[table(sequence, "item", "seen", "liked"), table(sequence, "words", "word", "seen")],
            device=torch.device(device),
        )
        self.ebc = torchrec.EmbeddingBagCollection(
            tables=[
                table(bag, "places", "place", pooling=torchrec.PoolingType.MEAN),
                table(bag, "users", "user", pooling=torchrec.PoolingType.SUM),
            ],
            device=torch.device(device),
        )
        self.dense = nn.Linear(DIM, 1)

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor]:
        rows, pooled = self.ec(batch.ids), self.ebc(batch.ids)
        parts = [rows[name].values() for name in ("seen@item", "seen@words", "liked", "word")]
        out = self.dense(torch.cat([*(p.tanh() for p in parts), pooled["user"], pooled["place"]])).mean()
        return ((out - batch.label) ** 2).sum() + 0.01 * sum((p**2).sum() for p in parts), out


def batches(rank: int, num_steps: int = STEPS) -> Iterator[Batch]:
    g = torch.Generator().manual_seed(rank)
    tables = {"seen": "words", "liked": "item", "word": "words", "user": "users", "place": "places"}
    for _ in range(num_steps):
        lengths = torch.randint(0, 4, (len(FEATURES), 5), generator=g)
        values = [
            (torch.rand(int(n.sum()), generator=g) ** 2 * ROWS[tables[f]]).long()
            for f, n in zip(FEATURES, lengths, strict=True)
        ]
        ids = torchrec.KeyedJaggedTensor(list(FEATURES), torch.cat(values), lengths=lengths.reshape(-1))
        yield Batch(ids, torch.rand(1, generator=g))


def distribute(model: Model, kinds: dict[str, str], *, prioritized: bool, mode: str = "prioritized") -> Any:
    from fbgemm_gpu.split_embedding_configs import EmbOptimType
    from torchrec.distributed.embedding import EmbeddingCollectionSharder
    from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
    from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
    from torchrec.distributed.planner.types import ParameterConstraints

    fused = {"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD, "learning_rate": LR, "eps": 1e-8}
    theirs = [EmbeddingCollectionSharder(fused_params=fused), EmbeddingBagCollectionSharder(fused_params=fused)]
    sharders: list[Any] = theirs
    if prioritized:
        classes = (
            fs_embed.PrioritizedEmbeddingCollectionSharder,
            fs_embed.PrioritizedEmbeddingBagCollectionSharder,
        )
        sharders = [
            kind(fs_embed.RowWiseAdagrad(lr=LR), others=others, mode=mode, timeout_s=30.0)
            for kind, others in zip(classes, theirs, strict=True)
        ]
    constraints = {name: ParameterConstraints(sharding_types=[kind], min_partition=4) for name, kind in kinds.items()}
    planner = EmbeddingShardingPlanner(
        topology=Topology(world_size=dist.get_world_size(), compute_device="cpu"), constraints=constraints
    )
    plan = planner.collective_plan(model, sharders, dist.group.WORLD)
    return torchrec.distributed.DistributedModelParallel(
        model, device=torch.device("cpu"), plan=plan, sharders=sharders
    )


def train(model: Any, loop: str, num_steps: int = STEPS) -> list[float]:
    from torchrec.distributed.train_pipeline import TrainPipelineBase, TrainPipelineSparseDist

    dense = torch.optim.SGD(model.module.dense.parameters(), lr=0.1)
    todo: Any = batches(dist.get_rank(), num_steps)
    if loop.endswith("lookahead"):
        tables = {name: (lambda batch: [batch.ids]) for name, _ in fs_embed.prioritized_modules(model)}
        todo = fs_embed.lookahead(todo, model, tables)
    losses: list[float] = []
    if loop.startswith("plain"):
        for batch in todo:
            loss, out = model(batch)
            dense.zero_grad()
            loss.backward()
            dense.step()
            losses.append(float(out.detach()))
        return losses
    kind = TrainPipelineSparseDist if loop == "sparse_dist" else TrainPipelineBase
    pipeline = kind(model, dense, torch.device("cpu"))
    try:
        while True:
            losses.append(float(pipeline.progress(todo).detach()))
    except StopIteration:
        return losses


def whole(state: dict[str, Any]) -> dict[str, Tensor]:
    """Every tensor of a state, put together from all ranks' shards; TorchRec has some on their owners alone."""
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, _pieces(state))
    out: dict[str, Tensor] = {}
    for name, size, start, piece in (entry for of_rank in everyone for entry in of_rank):
        target = out.setdefault(name, torch.zeros(size, dtype=piece.dtype))
        target[tuple(slice(a, a + n) for a, n in zip(start, piece.shape, strict=True))] = piece
    return out


def _pieces(state: dict[str, Any]) -> list[tuple[str, tuple[int, ...], tuple[int, ...], Tensor]]:
    found: list[tuple[str, tuple[int, ...], tuple[int, ...], Tensor]] = []
    for name, value in state.items():
        if isinstance(value, dict):
            found += [(f"{name}/{key}", *rest) for key, *rest in _pieces(value)]
        elif hasattr(value, "local_shards"):
            size = tuple(value.metadata().size)
            found += [(name, size, tuple(s.metadata.shard_offsets), s.tensor.detach()) for s in value.local_shards()]
        else:
            value = (value.full_tensor() if hasattr(value, "full_tensor") else value).detach().clone()
            found.append((name, tuple(value.shape), (0,) * value.dim(), value))
    return found


@dataclass
class Run:
    losses: list[float]
    state: dict[str, Tensor]
    optimizer: dict[str, Tensor]
    misses: float


def run(loop: str, kinds: dict[str, str], *, prioritized: bool, mode: str = "prioritized") -> Run:
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*without having been prefetched")
        plain = Model()
        rows = {k: v.clone() for k, v in plain.ebc.state_dict().items()}
        model = distribute(plain, kinds, prioritized=prioritized, mode=mode)
        if not prioritized:  # TorchRec leaves out rows of bags on the CPU
            model.module.ebc.load_state_dict(rows)
        losses = train(model, loop)
    modules = [module for _, module in fs_embed.prioritized_modules(model)]
    found = Run(
        losses, whole(model.state_dict()), whole(model.fused_optimizer.state_dict()),
        sum(module.stats()["misses"] for module in modules),
    )  # fmt: skip
    for module in modules:
        module.close()
    return found


def _difference(a: Run, b: Run) -> float:
    assert set(a.state) == set(b.state)
    assert set(a.optimizer) == set(b.optimizer)
    pairs = [(a.state[k], b.state[k]) for k in a.state] + [(a.optimizer[k], b.optimizer[k]) for k in a.optimizer]
    pairs.append((torch.tensor(a.losses), torch.tensor(b.losses)))
    assert len(a.losses) == STEPS
    return max(float((x - y).abs().max()) for x, y in pairs)


def _against_torchrec(loop: str, kinds: dict[str, str]) -> tuple[float, float]:
    # On the CPU TorchRec has no row-wise bags; how a table is cut does not change what it learns.
    cut = kinds | {"users": "table_wise", "places": "table_wise"}
    theirs = run(loop.removesuffix("+lookahead"), cut, prioritized=False)
    ours = run(loop, kinds, prioritized=True)
    return _difference(ours, theirs), ours.misses


@pytest.mark.parametrize("kinds", [MIXED, dict.fromkeys(ROWS, "row_wise")], ids=["mixed", "row-wise"])
@pytest.mark.parametrize("loop", ["plain", "plain+lookahead", "base", "base+lookahead", "sparse_dist"])
def test_a_distributed_model_learns_what_torchrec_learns(
    ranks: Callable[[int], RankPool], loop: str, kinds: dict[str, str]
) -> None:
    # TrainPipelineBase holds one batch more than lookahead expects, which each table finds out in two steps.
    most_misses = {"plain+lookahead": 0, "sparse_dist": 0, "base+lookahead": 4}.get(loop, 2 * STEPS)
    for difference, misses in ranks(2).run(_against_torchrec, loop, kinds, timeout_s=180):
        assert difference < 1e-5  # a row's few gradients in another order
        assert misses <= most_misses


def _bits_of_synchronous() -> bool:
    found, expected = (run("sparse_dist", MIXED, prioritized=True, mode=m) for m in ("prioritized", "synchronous"))
    return _difference(found, expected) == 0.0


def test_a_pipeline_gives_the_bits_of_synchronous(ranks: Callable[[int], RankPool]) -> None:
    assert ranks(2).run(_bits_of_synchronous, timeout_s=120) == [True, True]


def _meta() -> tuple[bool, set[str], set[str]]:
    model = distribute(Model(device="meta"), MIXED, prioritized=True)
    losses = train(model, "sparse_dist")
    names = {name for name, _ in model.named_parameters()}
    for _, module in fs_embed.prioritized_modules(model):
        module.close()
    return all(torch.isfinite(torch.tensor(losses))), names, set(model.state_dict())


def test_tables_on_the_meta_device_get_rows(ranks: Callable[[int], RankPool]) -> None:
    dense = {"dense.weight", "dense.bias"}
    theirs = {"ec.embeddings.words.weight", "ebc.embedding_bags.places.weight"}
    ours = {"ec.embeddings.item.weight", "ebc.embedding_bags.users.weight"}
    for finite, parameters, state in ranks(2).run(_meta, timeout_s=120):
        assert finite
        assert parameters == dense | theirs  # ours are updated in the backward, and are no parameters
        assert state == dense | theirs | ours


def _refusals() -> list[str]:
    texts: list[str] = []
    sharder: Any = fs_embed.PrioritizedEmbeddingCollectionSharder(fs_embed.SGD(lr=LR))
    for prepare in (_planned_by_column, _with_optimizer):
        model = Model().ec
        plan = prepare(model, sharder)
        try:
            sharder.shard(model, plan, torchrec.distributed.types.ShardingEnv.from_process_group(dist.group.WORLD))
        except ValueError as error:
            texts.append(str(error))
    return texts


def _planned_by_column(model: Any, sharder: Any) -> Any:
    return _plan(model, torchrec.distributed.embedding.EmbeddingCollectionSharder(), "column_wise")


def _with_optimizer(model: Any, sharder: Any) -> Any:
    plan = _plan(model, sharder, "row_wise")
    model.embeddings["item"].weight._optimizer_classes = [torch.optim.SGD]
    return plan


def _plan(model: Any, sharder: Any, kind: str) -> Any:
    from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
    from torchrec.distributed.planner.types import ParameterConstraints

    planner = EmbeddingShardingPlanner(
        topology=Topology(world_size=dist.get_world_size(), compute_device="cpu"),
        constraints={name: ParameterConstraints(sharding_types=[kind], min_partition=4) for name in ("item", "words")},
    )
    return planner.collective_plan(model, [sharder], dist.group.WORLD).plan[""]


def test_plans_and_optimizers_that_do_not_fit_are_refused(ranks: Callable[[int], RankPool]) -> None:
    for by_column, with_optimizer in ranks(2).run(_refusals, timeout_s=120):
        assert "must be planned row-wise" in by_column
        assert "give the sharder `others`" in by_column
        assert "must not have an optimizer of apply_optimizer_in_backward" in with_optimizer


def test_the_sharders_are_asked_for_by_name_alone() -> None:
    assert fs_embed.PrioritizedEmbeddingCollectionSharder(fs_embed.SGD(lr=0.1)).sharding_types("cpu") == ["row_wise"]
    with pytest.raises(AttributeError, match="no attribute 'Unknown'"):
        fs_embed.Unknown  # noqa: B018
