"""How long the training thread is blocked by embedding exchange, over a slow network, beside TorchRec's.

    python -m benchmarks.exposed_communication --ranks 2 --rate 300mbit --json

The paper's Figure 9. Needs root: each rank runs in a network namespace of its own, and the links between them are
rate-limited. Dense compute is a timed idle wait, a third of it in the forward. A batch has `ROWS` distinct ids a rank,
of which a share c is in the next batch too. Each id comes once: what index de-duplication would leave, which FBGEMM
has no CPU kernel for. Exposed: seconds in waits for exchanges, on the training thread.

TorchRec runs over gloo, and once more over fs_comm's group: gloo's AllToAll sends before it posts its receives, so that
the two directions of a slow link often run one after the other (see `fs_comm.transports.gloo`).
"""

import argparse
import itertools
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.fx
from torch import Tensor, nn

import fs_comm
import fs_embed
from benchmarks.report import Row, publish, row

ROWS, DIM, TABLE_ROWS = 14_000, 64, 400_000
SHARES = (0.0, 0.05, 0.1, 0.25, 0.5, 1.0)
WARM_UP = 3


Batch = Any
"""A `KeyedJaggedTensor` with the feature "item"."""


def draw(share: float, num_steps: int, rank: int) -> list[Tensor]:
    """A window that slides over a random order of the rank's rows: consecutive batches share `share` of them."""
    g = torch.Generator().manual_seed(rank)
    mine = torch.randperm(TABLE_ROWS // 2, generator=g) * 2 + rank % 2
    stride = round(ROWS * (1 - share))
    windows = [mine[(torch.arange(ROWS) + i * stride) % len(mine)] for i in range(num_steps)]
    return windows


class _Idle(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, dense_s: float) -> Tensor:
        ctx.dense_s = dense_s
        time.sleep(dense_s / 3)
        return rows.view_as(rows)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        BLOCKED.in_backward = True
        time.sleep(2 * ctx.dense_s / 3)
        return grad, None


def dense(rows: Tensor, dense_s: float) -> Tensor:
    return _Idle.apply(rows, dense_s).square().mean()


torch.fx.wrap("dense")  # SparseDist traces the model


class Model(nn.Module):
    def __init__(self, tables: nn.Module, dense_s: float) -> None:
        super().__init__()
        self.tables, self.dense_s = tables, dense_s

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor]:
        loss = dense(self.tables(batch)["item"].values(), self.dense_s)
        return loss, loss.detach()


class Blocked:
    """Seconds of this thread in waits for exchanges, by what was exchanged: counted inside torch.distributed."""

    def __init__(self) -> None:
        self.in_backward = False
        self.seconds: defaultdict[str, float] = defaultdict(float)

    def add(self, tensor: Tensor, seconds: float) -> None:
        kind = "ids" if not tensor.is_floating_point() else "gradients" if self.in_backward else "embeddings"
        self.seconds[kind] += seconds

    def wrap(self, collective: Callable[..., Any]) -> Callable[..., Any]:
        def timed(output: Tensor, *args: Any, **kwargs: Any) -> Any:
            started = time.perf_counter()
            work = collective(output, *args, **kwargs)
            if work is None:
                self.add(output, time.perf_counter() - started)
                return None
            return _TimedWork(work, output, self)

        return timed


class _TimedWork(dist.Work):
    def __init__(self, work: Any, tensor: Tensor, blocked: Blocked) -> None:
        super().__init__()
        self._work, self._tensor, self._blocked = work, tensor, blocked

    def wait(self, *args: Any) -> Any:
        started = time.perf_counter()
        out = self._work.wait(*args)
        self._blocked.add(self._tensor, time.perf_counter() - started)
        return out

    def is_completed(self) -> bool:
        return self._work.is_completed()


BLOCKED = Blocked()


def over_the_link(ranks: Sequence[int], timeout_s: float) -> dist.ProcessGroup:
    """By the network, for both sides: the ranks are on one host, and fs_comm would take its memory."""
    return fs_comm.new_group(ranks, transports=("gloo",), timeout_s=timeout_s)


def run_ours(mode: str, batches: list[Batch], dense_s: float) -> Iterator[dict[str, float]]:
    table = fs_embed.TableConfig("item", TABLE_ROWS, DIM, ("item",))
    tables = fs_embed.PrioritizedEmbeddingCollection(
        [table], optimizer=fs_embed.RowWiseAdagrad(lr=0.01), mode=mode, timeout_s=120.0, new_group=over_the_link
    )
    model = Model(tables, dense_s)
    phases = {"ids": ("ids", "headers"), "embeddings": ("rows",), "gradients": ("gradients",)}
    tables.prefetch([batches[0]])
    for batch, after in itertools.pairwise([*batches, None]):
        before = tables.stats()
        if mode == "prioritized":
            tables.prefetch(None if after is None else [after])
        assert batch is not None
        model(batch)[0].backward()
        now = tables.stats()
        found = {"exposed": now["exposed_wait_s"] - before["exposed_wait_s"]}
        if mode == "synchronous":
            for kind, names in phases.items():
                keys = [f"wait_s/{name}" for name in names]
                found[kind] = sum(now.get(k, 0.0) - before.get(k, 0.0) for k in keys)
        yield found
    tables.prefetch(None)
    tables.flush()
    tables.close()


def run_torchrec(
    pipeline: str, batches: list[Batch], dense_s: float, group: dist.ProcessGroup | None = None
) -> Iterator[dict[str, float]]:
    import torchrec
    from fbgemm_gpu.split_embedding_configs import EmbOptimType
    from torchrec.distributed.embedding import EmbeddingCollectionSharder
    from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
    from torchrec.distributed.planner.types import ParameterConstraints
    from torchrec.distributed.train_pipeline import TrainPipelineBase, TrainPipelineSparseDist
    from torchrec.distributed.types import ShardingEnv

    config = torchrec.EmbeddingConfig(num_embeddings=TABLE_ROWS, embedding_dim=DIM, name="item", feature_names=["item"])
    sharders: list[Any] = [
        EmbeddingCollectionSharder(
            fused_params={"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD, "learning_rate": 0.01}
        )
    ]
    planner = EmbeddingShardingPlanner(
        topology=Topology(world_size=dist.get_world_size(), compute_device="cpu"),
        constraints={"item": ParameterConstraints(sharding_types=["row_wise"])},
    )
    plain = Model(torchrec.EmbeddingCollection(tables=[config]), dense_s)
    group = group or dist.group.WORLD
    assert group is not None
    plan = planner.collective_plan(plain, sharders, group)
    device, env = torch.device("cpu"), ShardingEnv.from_process_group(group)
    model = torchrec.distributed.DistributedModelParallel(plain, env=env, device=device, plan=plan, sharders=sharders)
    kind = {"TrainPipelineBase": TrainPipelineBase, "TrainPipelineSparseDist": TrainPipelineSparseDist}[pipeline]
    running: Any = kind(model, model.fused_optimizer, device)
    source = iter(batches)
    for _ in batches:
        BLOCKED.in_backward = False
        BLOCKED.seconds.clear()
        running.progress(source)
        yield {"exposed": sum(BLOCKED.seconds.values()), **BLOCKED.seconds}


VARIANTS: dict[str, Callable[[list[Batch], float], Iterator[dict[str, float]]]] = {
    "prioritized": lambda b, s: run_ours("prioritized", b, s),
    "synchronous": lambda b, s: run_ours("synchronous", b, s),
    "TrainPipelineBase": lambda b, s: run_torchrec("TrainPipelineBase", b, s),
    "TrainPipelineSparseDist": lambda b, s: run_torchrec("TrainPipelineSparseDist", b, s),
    "SparseDist over fs_comm": lambda b, s: run_torchrec(
        "TrainPipelineSparseDist", b, s, over_the_link(range(dist.get_world_size()), 120.0)
    ),
}


def work(rank: int, options: argparse.Namespace) -> None:
    """One rank, in its namespace; rank 0 prints its samples."""
    import torchrec

    torch.set_num_threads(1)
    store = dist.TCPStore(options.master, 29_511, options.ranks, is_master=rank == 0, timeout=timedelta(seconds=120))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=options.ranks, timeout=timedelta(seconds=120))
    dist.all_to_all_single = BLOCKED.wrap(dist.all_to_all_single)
    found: list[dict[str, Any]] = []
    for dense_ms, share in plan(options):
        for variant in VARIANTS:
            num_steps = WARM_UP + options.steps
            lengths = torch.full((20,), ROWS // 20)
            batches = [
                torchrec.KeyedJaggedTensor(["item"], ids, lengths=lengths) for ids in draw(share, num_steps, rank)
            ]
            samples = list(VARIANTS[variant](batches, dense_ms / 1e3))[WARM_UP:-1]  # the last has no successor
            found.append({"variant": variant, "dense_ms": dense_ms, "share": share, "samples": samples})
            dist.barrier()
    if rank == 0:
        Path(options.out).write_text(json.dumps(found))
    dist.barrier()


def plan(options: argparse.Namespace) -> list[tuple[float, float]]:
    main = [(120.0, share) for share in SHARES]
    return main + [(ms, share) for ms in (60.0, 240.0) for share in ((0.05, 0.5) if options.all else ())]


class Network:
    """Namespaces joined by a bridge, every link at `rate`; what was made is taken down again."""

    def __init__(self, num_ranks: int, rate: str) -> None:
        self.num_ranks, self.rate = num_ranks, rate
        tag = f"{random.randrange(16**4):04x}"
        self.bridge, self.names = f"fsb{tag}", [f"fs{tag}n{r}" for r in range(num_ranks)]
        self.links = [f"fs{tag}v{r}" for r in range(num_ranks)]

    def __enter__(self) -> "Network":
        ip("link", "add", self.bridge, "type", "bridge")
        ip("link", "set", self.bridge, "up")
        for rank, (name, link) in enumerate(zip(self.names, self.links, strict=True)):
            ip("netns", "add", name)
            ip("link", "add", link, "type", "veth", "peer", "name", "eth0", "netns", name)
            ip("link", "set", link, "master", self.bridge, "up")
            ip("-n", name, "addr", "add", f"10.77.0.{rank + 1}/24", "dev", "eth0")
            ip("-n", name, "link", "set", "eth0", "up")
            ip("-n", name, "link", "set", "lo", "up")
            shaping = (
                "root",
                "tbf",
                "rate",
                self.rate,
                "burst",
                "256k",
                "latency",
                "200ms",
            )  # a queue that holds a whole message
            subprocess.run(("tc", "-n", name, "qdisc", "add", "dev", "eth0", *shaping), check=True)
        return self

    def __exit__(self, *_: object) -> None:
        for name in self.names:
            subprocess.run(("ip", "netns", "del", name), check=False)
        subprocess.run(("ip", "link", "del", self.bridge), check=False)


def ip(*arguments: str) -> None:
    subprocess.run(("ip", *arguments), check=True)


def summarize(found: list[dict[str, Any]]) -> tuple[list[Row], dict[str, Any]]:
    rows: list[Row] = []
    exposed: dict[str, dict[str, float]] = {}
    for run in found:
        x = f"c={run['share']}, dense {run['dense_ms']:.0f} ms"
        for kind in sorted({k for s in run["samples"] for k in s}):
            made = row(run["variant"], x, kind, "ms", [1e3 * s.get(kind, 0.0) for s in run["samples"]])
            rows.append(made)
            if kind == "exposed" and run["dense_ms"] == 120.0:
                exposed.setdefault(run["variant"], {})[str(run["share"])] = made.p50
    ours, theirs = exposed["prioritized"], exposed["TrainPipelineSparseDist"]
    within = {c: ours[c] <= (float(c) + 0.05) * theirs[c] for c in ours}
    return rows, {
        "exposed_ms": exposed,
        "within_bar": within,
        "ratio_to_sparse_dist": {c: ours[c] / theirs[c] for c in ours},
        "reduction": 1 - ours["0.05"] / theirs["0.05"],
        "reduction_over_fs_comm": 1 - ours["0.05"] / exposed["SparseDist over fs_comm"]["0.05"],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rate", default="300mbit", help="of every link, as tc takes it")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--all", action="store_true", help="also with 60 and 240 ms of dense compute")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--master", default="10.77.0.1", help=argparse.SUPPRESS)
    parser.add_argument("--out", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank is not None:
        work(options.rank, options)
        return 0
    if os.geteuid() != 0:
        sys.exit("network namespaces need root: run as root, or in a container with CAP_NET_ADMIN")
    with Network(options.ranks, options.rate) as network, tempfile.NamedTemporaryFile() as out:
        environment = {**os.environ, "GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "1"}
        flags = [f"--ranks={options.ranks}", f"--steps={options.steps}", f"--out={out.name}"]
        flags += ["--all"] if options.all else []
        ranks = [
            subprocess.Popen(
                ("ip", "netns", "exec", name, sys.executable, "-m", __spec__.name, f"--rank={rank}", *flags),
                env=environment,
                stderr=subprocess.DEVNULL if rank else None,
            )
            for rank, name in enumerate(network.names)
        ]
        try:
            failed = [r.wait(timeout=1200) for r in ranks]
        finally:
            for process in ranks:
                process.kill()
        if any(failed):
            return 1
        rows, figures = summarize(json.loads(Path(out.name).read_text()))
    publish(
        "exposed_communication", rows, {"ranks": options.ranks, "rate": options.rate} | figures, as_json=options.json
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
