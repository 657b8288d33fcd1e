"""Prioritized against synchronous, bit for bit; both against TorchRec; and proof that the comparison can fail.

python -m benchmarks.parity --ranks 2 --json
"""

import argparse
import itertools
import sys
import unittest.mock
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import fs_embed
from benchmarks.report import publish, row
from fs_embed.prioritized import PrioritizedEngine
from fs_embed.route import Route
from fs_embed.store import Store
from tests.ranks import RankPool

NUM_ROWS = {"user": 61, "item": 97}
OPTIMIZERS: dict[str, Any] = {
    "sgd": fs_embed.SGD(lr=0.05),
    "adagrad": fs_embed.Adagrad(lr=0.1),
    "rowwise_adagrad": fs_embed.RowWiseAdagrad(lr=0.1),
    "adam": fs_embed.Adam(lr=0.02),
}
MODULES = ("embedding", "collection", "bags")
Batch = dict[str, tuple[Tensor, Tensor]]
"""Feature to ids `(N,)` and lengths `(B,)`."""


@dataclass(frozen=True)
class Ids:
    """How a run's ids are drawn."""

    skew: str = "zipf"
    duplicates: bool = True
    empty_ranks: bool = True

    def __str__(self) -> str:
        return f"{self.skew}{'+duplicates' * self.duplicates}{'+empty' * self.empty_ranks}"


@dataclass(frozen=True)
class Run:
    losses: list[float]
    tables: dict[str, Tensor]

    def same_bits(self, other: "Run") -> bool:
        same_tables = all(torch.equal(t, other.tables[name]) for name, t in self.tables.items())
        return self.losses == other.losses and same_tables

    def max_abs_diff(self, other: "Run") -> float:
        return max(float((t - other.tables[name]).abs().max()) for name, t in self.tables.items())


def draw(ids: Ids, num_steps: int, rank: int) -> list[Batch]:
    g = torch.Generator().manual_seed(rank)
    return [_batch(ids, step, rank, g) for step in range(num_steps)]


def _batch(ids: Ids, step: int, rank: int, g: torch.Generator) -> Batch:
    out: Batch = {}
    for feature, table in (("user", "user"), ("seen", "item"), ("liked", "item")):
        lengths = torch.randint(0, 5, (6,), generator=g)
        if ids.empty_ranks and (step + rank) % 4 == 3:
            lengths = torch.zeros_like(lengths)
        n, rows = int(lengths.sum()), NUM_ROWS[table]
        uniform = torch.rand(n, generator=g)
        values = ((uniform**3 if ids.skew == "zipf" else uniform) * rows).long()
        if not ids.duplicates:
            values = torch.randperm(rows, generator=g)[:n]
        out[feature] = (values, lengths)
    return out


class Model(nn.Module):
    """Tables of two widths, one looked up by two features; the loss is not linear, so that a stale row shows."""

    def __init__(self, kind: str, mode: str, optimizer: Any, dims: dict[str, int]) -> None:
        super().__init__()
        g = torch.Generator().manual_seed(1)
        weights = {name: torch.randn(rows, dims[name], generator=g) for name, rows in NUM_ROWS.items()}
        options: dict[str, Any] = {"optimizer": optimizer, "mode": mode, "timeout_s": 60.0}
        features = {"user": ("user",), "item": ("seen", "liked")}
        self.kind, self.kinds = kind, list(weights)
        if kind == "embedding":
            self.item = fs_embed.PrioritizedEmbedding(weights["item"], padding_idx=0, **options)
            self.tables = [self.item]
        else:
            classes = {
                "collection": fs_embed.PrioritizedEmbeddingCollection,
                "bags": fs_embed.PrioritizedEmbeddingBagCollection,
            }
            configs = [fs_embed.TableConfig(n, len(w), w.shape[1], features[n]) for n, w in weights.items()]
            self.item = classes[kind](configs, weights=list(weights.values()), **options)
            self.tables = [self.item]

    def announce(self, batch: Batch | None) -> None:
        if batch is None:
            self.item.prefetch(None)
        elif self.kind == "embedding":
            self.item.prefetch([batch["seen"][0], batch["liked"][0]])
        else:
            self.item.prefetch([_plain(batch)])

    def forward(self, batch: Batch) -> Tensor:
        if self.kind == "embedding":
            return loss_of([self.item(batch["seen"][0]), self.item(batch["liked"][0])])
        out = self.item(_plain(batch))
        return loss_of([rows if isinstance(rows, Tensor) else rows.values() for rows in out.values()])

    def whole_tables(self) -> dict[str, Tensor]:
        state = self.item.state_dict()
        return {name: t.full_tensor() if hasattr(t, "full_tensor") else t.clone() for name, t in state.items()}


@dataclass(frozen=True)
class _Jagged:
    values: Tensor
    offsets: Tensor


def _plain(batch: Batch) -> dict[str, _Jagged]:
    return {
        name: _Jagged(values, torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]))
        for name, (values, lengths) in batch.items()
    }


def loss_of(rows: list[Tensor]) -> Tensor:
    total = torch.zeros(())
    for r in rows:
        total = total + ((r.tanh() - torch.linspace(-1, 1, r.shape[1])) ** 2).sum() + (r[:, :1] * r).sum() * 0.1
    return total


def train(kind: str, mode: str, optimizer: str, ids: Ids, num_steps: int, dims: dict[str, int] | None = None) -> Run:
    rank = dist.get_rank() if dist.is_initialized() else 0
    model = Model(kind, mode, OPTIMIZERS[optimizer], dims or {"user": 8, "item": 5})
    faces = fs_embed.TableOptimizers(model)
    schedule = torch.optim.lr_scheduler.ExponentialLR(faces, 0.97)
    batches: list[Batch | None] = [*draw(ids, num_steps, rank), None]
    losses: list[float] = []
    model.announce(batches[0])
    for batch, following in itertools.pairwise(batches):
        model.announce(following)
        assert batch is not None
        loss = model(batch)
        loss.backward()
        faces.step()
        schedule.step()
        losses.append(float(loss.detach()))
    model.announce(None)
    tables = model.whole_tables()
    if mode == "prioritized":
        stats = model.item.stats()
        assert stats["misses"] == 0, stats
    model.item.close()
    return Run(losses, tables)


# Deliberate faults: each is a prioritized engine that does one thing wrong.


class _Postponing(PrioritizedEngine):
    """Keeps deferred gradients until the next opening."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.kept: list[Callable[[], None]] = []

    def apply_kept(self) -> None:
        while self.kept:
            self.kept.pop()()


class AppliesAfterLookup(_Postponing):
    """Deferred gradients of i-1 go in after the rows for i+1 were read."""

    def _apply_deferred(self, slots: Tensor, grads: Tensor, number: int, optimizer: Any) -> None:
        self.kept.append(lambda: self.store.update_(slots, grads, number, optimizer))

    def _open(self, *args: Any) -> None:
        super()._open(*args)
        self.apply_kept()


class TakesRateWhenApplied(_Postponing):
    """The learning rate of the moment at which the deferred gradients are applied, not of their backward."""

    def _apply_deferred(self, slots: Tensor, grads: Tensor, number: int, optimizer: Any) -> None:
        self.kept.append(lambda: self.store.update_(slots, grads, number, self.store.optimizer_now()))

    def _open(self, *args: Any) -> None:
        self.apply_kept()
        super()._open(*args)


class SplitsBeforeExchange(PrioritizedEngine):
    """Each rank's ids are compared with its own: what other ranks write goes unseen."""

    def _shared(self, route: Route, other: Route) -> Tensor:
        n = self.store.shards.num_slots
        return torch.isin(route.slots + n * route.asker, other.slots + n * other.asker)


class CountsTwoSteps(PrioritizedEngine):
    """The deferred portion counts as a step of its own."""

    def _apply_deferred(self, slots: Tensor, grads: Tensor, number: int, optimizer: Any) -> None:
        super()._apply_deferred(slots, grads, self.store.next_step(), optimizer)


class _SplitStore(Store):
    def update_(self, slots: Tensor, grads: Tensor, step: int, optimizer: Any) -> None:
        half = len(slots) // 2
        super().update_(slots[:half], grads[:half], step, optimizer)
        super().update_(slots[half:], grads[half:], step, optimizer)


class SplitsDuplicates(PrioritizedEngine):
    """Gradients of one row from two ranks become two updates."""

    def __init__(self, store: Store, *args: Any, **kwargs: Any) -> None:
        store.__class__ = _SplitStore
        super().__init__(store, *args, **kwargs)


FAULTS: dict[str, tuple[type[PrioritizedEngine], str]] = {
    "deferred gradient applied after the lookup": (AppliesAfterLookup, "sgd"),
    "mask taken before the id exchange": (SplitsBeforeExchange, "sgd"),
    "duplicates split": (SplitsDuplicates, "rowwise_adagrad"),
    "learning rate taken at apply time": (TakesRateWhenApplied, "sgd"),
    "two step counts": (CountsTwoSteps, "adam"),
}


def is_caught(fault: str, num_steps: int) -> bool:
    """Whether the comparison of a run with the fault fails on this rank."""
    engine, optimizer = FAULTS[fault]
    expected = train("collection", "synchronous", optimizer, Ids(), num_steps)
    with unittest.mock.patch("fs_embed.tables.PrioritizedEngine", engine):
        found = train("collection", "prioritized", optimizer, Ids(), num_steps)
    return not found.same_bits(expected)


def is_equal(kind: str, optimizer: str, ids: Ids, num_steps: int) -> bool:
    expected = train(kind, "synchronous", optimizer, ids, num_steps)
    return train(kind, "prioritized", optimizer, ids, num_steps).same_bits(expected)


def against_torchrec(kind: str, optimizer: str, num_steps: int) -> float:
    """Largest difference of any weight after the same steps of TorchRec's row-wise sharded module, same losses."""
    ours = train(kind, "prioritized", optimizer, Ids(), num_steps, {"user": 8, "item": 8})
    theirs = train_torchrec(kind, optimizer, num_steps)
    names = {name.split(".")[-2]: t for name, t in ours.tables.items()}
    return Run(ours.losses, names).max_abs_diff(theirs)


def train_torchrec(kind: str, optimizer: str, num_steps: int) -> Run:
    import torchrec
    from fbgemm_gpu.split_embedding_configs import EmbOptimType
    from torchrec.distributed.embedding import EmbeddingCollectionSharder
    from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
    from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
    from torchrec.distributed.planner.types import ParameterConstraints

    dim, features = 8, {"user": ["user"], "item": ["seen", "liked"]}
    if kind == "collection":
        configs = [torchrec.EmbeddingConfig(num_embeddings=r, embedding_dim=dim, name=n, feature_names=features[n])
                   for n, r in NUM_ROWS.items()]  # fmt: skip
        module: Any = torchrec.EmbeddingCollection(tables=configs)
        sharder: Any = EmbeddingCollectionSharder
    else:
        bags = [torchrec.EmbeddingBagConfig(num_embeddings=r, embedding_dim=dim, name=n, feature_names=features[n])
                for n, r in NUM_ROWS.items()]  # fmt: skip
        module = torchrec.EmbeddingBagCollection(tables=bags)
        sharder = EmbeddingBagCollectionSharder
    kinds = {"sgd": EmbOptimType.EXACT_SGD, "rowwise_adagrad": EmbOptimType.EXACT_ROWWISE_ADAGRAD}
    rate = OPTIMIZERS[optimizer].lr
    sharders = [sharder(fused_params={"optimizer": kinds[optimizer], "learning_rate": rate})]
    # On CPU TorchRec has no row-wise bags; how a table is cut does not change what it learns.
    cut = "row_wise" if kind == "collection" else "table_wise"
    constraints = {n: ParameterConstraints(sharding_types=[cut]) for n in NUM_ROWS}
    topology = Topology(world_size=dist.get_world_size(), compute_device="cpu")
    planner = EmbeddingShardingPlanner(topology=topology, constraints=constraints)
    plan = planner.collective_plan(module, sharders, dist.group.WORLD)
    model = torchrec.distributed.DistributedModelParallel(
        module, device=torch.device("cpu"), plan=plan, sharders=sharders
    )
    g = torch.Generator().manual_seed(1)
    weights = {name: torch.randn(rows, dim, generator=g) for name, rows in NUM_ROWS.items()}
    for name, t in model.state_dict().items():
        for shard in t.local_shards():
            start = shard.metadata.shard_offsets[0]
            shard.tensor.detach().copy_(weights[name.split(".")[-2]][start : start + len(shard.tensor)])
    losses: list[float] = []
    for batch in draw(Ids(), num_steps, dist.get_rank()):
        keys = list(batch)
        kjt = torchrec.KeyedJaggedTensor(
            keys, torch.cat([batch[k][0] for k in keys]), lengths=torch.cat([batch[k][1] for k in keys])
        )
        out = model(kjt)
        rows = [out[k] if kind == "bags" else out[k].values() for k in keys]
        loss = loss_of(rows)
        loss.backward()
        losses.append(float(loss.detach()))
        for group in model.fused_optimizer.param_groups:
            group["lr"] *= 0.97
        model.fused_optimizer.step()
    tables: dict[str, Tensor] = {}
    for name, t in model.state_dict().items():
        whole = torch.zeros(NUM_ROWS[name.split(".")[-2]], dim)
        for shard in t.local_shards():
            start = shard.metadata.shard_offsets[0]
            whole[start : start + len(shard.tensor)] = shard.tensor
        dist.all_reduce(whole)
        tables[name.split(".")[-2]] = whole
    return Run(losses, tables)


def cases() -> Iterator[tuple[str, str, Ids]]:
    for kind, optimizer, skew in itertools.product(MODULES, OPTIMIZERS, ("zipf", "uniform")):
        for duplicates, empty in itertools.product((True, False), repeat=2):
            yield kind, optimizer, Ids(skew, duplicates, empty)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    pool, rows = RankPool(options.ranks), []
    try:
        unequal: list[str] = []
        for kind, optimizer, ids in cases():
            equal = all(pool.run(is_equal, kind, optimizer, ids, options.steps, timeout_s=300))
            rows.append(row(f"{kind}, {optimizer}", str(ids), "bitwise equal", "bool", float(equal)))
            unequal += [] if equal else [f"{kind}, {optimizer}, {ids}"]
        diffs: dict[str, float] = {}
        for kind, optimizer in itertools.product(("collection", "bags"), ("sgd", "rowwise_adagrad")):
            diff = max(pool.run(against_torchrec, kind, optimizer, options.steps, timeout_s=300))
            diffs[f"{kind}, {optimizer}"] = diff
            rows.append(row(f"{kind}, {optimizer}", "TorchRec", "max abs difference", "weight", diff))
        caught = {fault: any(pool.run(is_caught, fault, options.steps, timeout_s=300)) for fault in FAULTS}
        rows += [row(fault, "fault", "caught", "bool", float(found)) for fault, found in caught.items()]
    finally:
        pool.close()
    figures = {
        "ranks": options.ranks,
        "steps": options.steps,
        "bitwise_equal": not unequal,
        "unequal": unequal,
        "torchrec_max_abs_diff": max(diffs.values()),
        "faults_caught": all(caught.values()),
        "faults": caught,
    }
    publish(f"parity_{options.ranks}_ranks", rows, figures, as_json=options.json)
    return 0 if not unequal and all(caught.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
