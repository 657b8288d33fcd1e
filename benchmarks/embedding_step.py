"""One embedding step, forward and backward with the update, beside TorchRec's sharded `EmbeddingCollection`; same ids.

    python -m benchmarks.embedding_step --json               two ranks on the CPU, nothing overlapped
    python -m benchmarks.embedding_step --device cuda --json  one rank, on a GPU

CPU: our synchronous mode against TorchRec, both as they come (ours over fs_comm, TorchRec over gloo) and each over the
other's group. FBGEMM has no CPU kernel for TorchRec's index de-duplication, so there are two kinds of batches: ids that
repeat, for TorchRec without it, and ids that come once each, which is what it leaves: TorchRec with a de-duplication
that costs nothing. Floor: the bytes of one step through a plain AllToAll on our group.

GPU: 4 M rows of 128, 581 k ids of which 391 k are distinct. Floor: what a device copy takes for the bytes that the step
must read and write. TorchRec runs where it is installed.
"""

import argparse
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import fs_comm
import fs_embed
from benchmarks.report import Row, publish, row
from tests.ranks import RankPool

LR, EPS = 0.01, 1e-8
WARM_UP = 3


@dataclass(frozen=True)
class Size:
    table_rows: int
    dim: int
    num_ids: int
    """Of a rank's batch."""
    num_distinct: int


CPU = Size(400_000, 64, 28_000, 19_000)
GPU = Size(4_000_000, 128, 581_000, 391_000)


def draw(size: Size, repeats: bool, seed: int, device: str) -> Tensor:
    """`(num_ids,)`: `num_distinct` rows, the others again, popular ones more often; or each row once."""
    g = torch.Generator().manual_seed(seed)
    distinct = torch.randperm(size.table_rows, generator=g)[: size.num_distinct]
    if not repeats:
        return distinct.to(device)
    more = distinct[(torch.rand(size.num_ids - size.num_distinct, generator=g) ** 2 * size.num_distinct).long()]
    ids = torch.cat([distinct, more])
    return ids[torch.randperm(size.num_ids, generator=g)].to(device)


@dataclass
class Subject:
    """One side: looks ids up, and takes a gradient for the rows."""

    look_up: Callable[[Tensor], Tensor]
    sent: Callable[[], float]
    """Bytes to other ranks so far."""
    announce: Callable[[Tensor | None], None] = lambda ids: None
    close: Callable[[], None] = lambda: None
    forward_ms: list[float] = field(default_factory=list[float])
    backward_ms: list[float] = field(default_factory=list[float])
    num_bytes: float = 0.0
    """Sent to other ranks in the steps that were run."""


def ours(size: Size, mode: str, device: str, new_group: Any = None) -> Subject:
    table = fs_embed.TableConfig("item", size.table_rows, size.dim, ("item",))
    module = fs_embed.PrioritizedEmbeddingCollection(
        [table], optimizer=fs_embed.RowWiseAdagrad(lr=LR, eps=EPS), mode=mode, device=torch.device(device),
        new_group=new_group, timeout_s=120.0,
    )  # fmt: skip
    lookahead = (
        (lambda ids: module.prefetch(None if ids is None else [{"item": ids}])) if mode == "prioritized" else None
    )
    return Subject(
        lambda ids: module({"item": ids})["item"].values(),
        lambda: module.stats()["bytes_sent"],
        lookahead or (lambda ids: None),
        module.close,
    )


SENT: Counter[str] = Counter()
"""Bytes that TorchRec's collectives sent to other ranks."""


def counted(collective: Callable[..., Any]) -> Callable[..., Any]:
    def call(output: Tensor, input: Tensor, *args: Any, **kwargs: Any) -> Any:
        splits = kwargs.get("input_split_sizes") or [len(input) // dist.get_world_size()] * dist.get_world_size()
        row_bytes = input.numel() // max(1, len(input)) * input.element_size()
        SENT["bytes"] += row_bytes * (sum(splits) - splits[dist.get_rank()])
        return collective(output, input, *args, **kwargs)

    return call


def torchrecs(size: Size, device: str, group: dist.ProcessGroup | None = None) -> Subject:
    import torchrec
    from fbgemm_gpu.split_embedding_configs import EmbOptimType
    from torchrec.distributed.embedding import EmbeddingCollectionSharder
    from torchrec.distributed.sharding_plan import construct_module_sharding_plan, row_wise
    from torchrec.distributed.types import ShardingEnv

    group = group or dist.group.WORLD
    assert group is not None
    config = torchrec.EmbeddingConfig(
        num_embeddings=size.table_rows, embedding_dim=size.dim, name="item", feature_names=["item"]
    )
    plain = torchrec.EmbeddingCollection(tables=[config], device=torch.device("meta"))
    fused = {"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD, "learning_rate": LR, "eps": EPS}
    # On a GPU it has the kernel for de-duplication; the CPU gets it by batches of distinct ids.
    sharder = EmbeddingCollectionSharder(fused_params=fused, use_index_dedup=device == "cuda")
    world_size = dist.get_world_size()
    plan = construct_module_sharding_plan(
        plain,
        {"item": row_wise(compute_kernel="fused")},
        sharder,
        local_size=world_size,
        world_size=world_size,
        device_type=device,
    )
    module = sharder.shard(plain, plan, ShardingEnv.from_process_group(group), torch.device(device))

    def look_up(ids: Tensor) -> Tensor:
        lengths = torch.tensor([len(ids)], device=ids.device)
        return module(torchrec.KeyedJaggedTensor(["item"], ids, lengths=lengths)).wait()["item"].values()

    return Subject(look_up, lambda: SENT["bytes"])


def step(subject: Subject, ids: Tensor, after: Tensor | None, gradient: Tensor, wait: Callable[[], object]) -> None:
    subject.announce(after)
    wait()
    sent, started = subject.sent(), time.perf_counter()
    rows = subject.look_up(ids)
    wait_device(rows)
    looked_up = time.perf_counter()
    rows.backward(gradient[: len(ids)])
    wait_device(rows)
    subject.forward_ms.append((looked_up - started) * 1e3)
    subject.backward_ms.append((time.perf_counter() - looked_up) * 1e3)
    subject.num_bytes += subject.sent() - sent


def wait_device(rows: Tensor) -> None:
    if rows.is_cuda:
        torch.cuda.synchronize()


def measure(subjects: dict[str, Subject], batches: list[Tensor], gradient: Tensor, wait: Callable[[], object]) -> None:
    """All subjects in turn on each batch, so that a slow moment of the machine meets all of them."""
    for subject in subjects.values():
        subject.announce(batches[0])
    for number, ids in enumerate(batches):
        after = batches[number + 1] if number + 1 < len(batches) else None
        for subject in subjects.values():
            step(subject, ids, after, gradient, wait)
    for subject in subjects.values():
        subject.announce(None)
        del subject.forward_ms[:WARM_UP], subject.backward_ms[:WARM_UP]


# Two ranks on the CPU.

OVER = {"gloo": lambda ranks, timeout_s: fs_comm.new_group(ranks, transports=("gloo",), timeout_s=timeout_s)}
Found = dict[str, tuple[list[float], list[float], float]]
"""By subject: milliseconds of each forward and backward, and bytes sent in a step."""


def on_cpu(repeats: bool, num_steps: int) -> Found:
    """Run by each rank."""
    size = CPU if repeats else Size(CPU.table_rows, CPU.dim, CPU.num_distinct, CPU.num_distinct)
    shared = fs_comm.new_group(timeout_s=120.0)
    plain_group = dist.new_group(backend="gloo")
    dist.all_to_all_single, kept = counted(dist.all_to_all_single), dist.all_to_all_single
    try:
        subjects = {
            "ours": ours(size, "synchronous", "cpu"),
            "ours over gloo": ours(size, "synchronous", "cpu", OVER["gloo"]),
            "torchrec": torchrecs(size, "cpu"),
            "torchrec over fs_comm": torchrecs(size, "cpu", shared),
            "floor": floor(size, shared),
        }
        batches = [draw(size, repeats, 1000 * dist.get_rank() + i, "cpu") for i in range(num_steps + WARM_UP)]
        gradient = torch.randn(size.num_ids, size.dim, generator=torch.Generator().manual_seed(0))
        measure(subjects, batches, gradient, lambda: dist.barrier(group=plain_group))
    finally:
        dist.all_to_all_single = kept
    for subject in subjects.values():
        subject.close()
    return {name: (s.forward_ms, s.backward_ms, s.num_bytes / len(batches)) for name, s in subjects.items()}


class _Exchange(torch.autograd.Function):
    """The rows of distinct ids from their owners, and as many gradients back: nothing but the bytes."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, rows: Tensor, num_ids: int, group: dist.ProcessGroup) -> Tensor:
        ctx.rows, ctx.group = rows, group
        dist.all_to_all_single(torch.empty_like(rows), rows, group=group)
        return rows.new_empty(num_ids, rows.shape[1])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        dist.all_to_all_single(torch.empty_like(ctx.rows), ctx.rows, group=ctx.group)
        return None, None, None, None


def floor(size: Size, group: dist.ProcessGroup) -> Subject:
    world_size = dist.get_world_size()
    rows = torch.randn(size.num_distinct // world_size * world_size, size.dim)
    anchor = torch.zeros((), requires_grad=True)
    return Subject(lambda ids: _Exchange.apply(anchor, rows, len(ids), group), lambda: 0.0)  # pyright: ignore


def cpu(num_steps: int) -> tuple[list[Row], dict[str, Any]]:
    rows: list[Row] = []
    figures: dict[str, Any] = {"ranks": 2, "ids": CPU.num_ids, "distinct": CPU.num_distinct}
    pool = RankPool(2)
    try:
        for kind, repeats in (("repeated ids", True), ("distinct ids", False)):
            of_ranks: list[Found] = pool.run(on_cpu, repeats, num_steps, timeout_s=500)
            medians: dict[str, float] = {}
            sent: dict[str, float] = {}
            for name in of_ranks[0]:
                # A step takes as long as on its slowest rank.
                forward, backward = (slowest([found[name][k] for found in of_ranks]) for k in (0, 1))
                both = [f + b for f, b in zip(forward, backward, strict=True)]
                sent[name] = sum(found[name][2] for found in of_ranks) / len(of_ranks)
                medians[name] = row("", "", "", "", both).p50
                rows += [row(name, kind, what, "ms", t) for what, t in
                         (("forward", forward), ("backward", backward), ("step", both))]  # fmt: skip
                rows.append(row(name, kind, "bytes sent a step", "bytes", sent[name]))
            figures[kind] = {
                "step_ms": {name: round(ms, 2) for name, ms in medians.items()},
                "ratio_step": round(medians["torchrec"] / medians["ours"], 3),
                "ratio_step_both_over_gloo": round(medians["torchrec"] / medians["ours over gloo"], 3),
                "ratio_step_both_over_fs_comm": round(medians["torchrec over fs_comm"] / medians["ours"], 3),
                "ratio_bytes": round(sent["torchrec"] / sent["ours"], 3),
                "over_floor": round(medians["ours"] / medians["floor"], 2),
            }
    finally:
        pool.close()
    figures["ratio_step"] = min(figures[kind]["ratio_step"] for kind in ("repeated ids", "distinct ids"))
    figures["ratio_bytes"] = {kind: figures[kind]["ratio_bytes"] for kind in ("repeated ids", "distinct ids")}
    return rows, figures


def slowest(of_ranks: list[list[float]]) -> list[float]:
    return [max(times) for times in zip(*of_ranks, strict=True)]


# One rank on a GPU.


def one_rank(size: Size, device: str, num_steps: int) -> tuple[list[Row], dict[str, Any]]:
    subjects = {mode: ours(size, mode, device) for mode in ("synchronous", "prioritized")}
    if device == "cuda":
        subjects |= torchrec_on_gpu(size)
    batches = [draw(size, True, seed, device) for seed in range(4)]
    batches = [batches[i % len(batches)].clone() for i in range(num_steps + WARM_UP)]
    gradient = torch.randn(size.num_ids, size.dim, device=device)
    measure(subjects, batches, gradient, lambda: wait_device(gradient))
    row_bytes = 4 * size.dim
    # Rows read once and written where each id stands; gradients read; rows read and written again.
    needed = {
        "forward": (size.num_distinct + size.num_ids) * row_bytes,
        "backward": (size.num_ids + 2 * size.num_distinct) * row_bytes,
    }
    floors = {what: copy_ms(num_bytes, device) for what, num_bytes in needed.items()}
    rows = [row("floor", size.num_ids, what, "ms", ms) for what, ms in floors.items()]
    figures: dict[str, Any] = {"ids": size.num_ids, "distinct": size.num_distinct, "rows": size.table_rows}
    figures["floor_ms"] = {what: round(ms, 3) for what, ms in floors.items()}
    for name, subject in subjects.items():
        times = {"forward": subject.forward_ms, "backward": subject.backward_ms}
        found = {what: row(name, size.num_ids, what, "ms", t) for what, t in times.items()}
        rows += found.values()
        figures[name] = {what: round(r.p50, 3) for what, r in found.items()}
    if "torchrec" in figures:
        figures["ratio"] = {
            what: round(figures["torchrec"][what] / figures["synchronous"][what], 2) for what in ("forward", "backward")
        }
    for subject in subjects.values():
        subject.close()
    return rows, figures


def torchrec_on_gpu(size: Size) -> dict[str, Subject]:
    try:
        import torchrec  # noqa: F401
    except ImportError as error:
        print(f"TorchRec is left out: {error}", file=sys.stderr)
        return {}
    if not dist.is_initialized():
        dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    return {"torchrec": torchrecs(size, "cuda")}


def copy_ms(num_bytes: int, device: str) -> float:
    """What the device takes to read half of the bytes and write the other half."""
    source = torch.empty(num_bytes // 2, dtype=torch.uint8, device=device)
    target, times = torch.empty_like(source), list[float]()
    for _ in range(12):
        wait_device(source)
        started = time.perf_counter()
        target.copy_(source)
        wait_device(source)
        times.append((time.perf_counter() - started) * 1e3)
    return sorted(times)[len(times) // 2]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    rows, figures = cpu(options.steps) if options.device == "cpu" else one_rank(GPU, "cuda", options.steps)
    publish(f"embedding_step_{options.device}", rows, figures, as_json=options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
