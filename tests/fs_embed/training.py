"""A small training run that all tests of parity share: skewed ids, duplicates, empty ranks, several lookups a step."""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

import fs_embed

NUM_ROWS, DIM = 37, 5


@dataclass(frozen=True)
class Run:
    losses: list[float]
    table: Tensor


def batches(rank: int, num_steps: int, *, num_lookups: int = 1, seed: int = 0) -> list[list[Tensor]]:
    """Ids of each step and lookup: Zipf-like, so that steps share rows; every fifth batch of a rank is empty."""
    g = torch.Generator().manual_seed(1000 * seed + rank)
    out: list[list[Tensor]] = []
    for step in range(num_steps):
        size = 0 if (step + rank) % 5 == 4 else int(torch.randint(1, 30, (), generator=g))
        skewed = [(torch.rand(size, generator=g) ** 3 * NUM_ROWS).long() for _ in range(num_lookups)]
        out.append(skewed)
    return out


def make_model(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    model = nn.Module()
    model.table = nn.Embedding(NUM_ROWS, DIM)
    return model


def loss_of(rows: list[Tensor], step: int) -> Tensor:
    """Not linear, so that a stale row changes the gradient too."""
    target = torch.linspace(-1, 1, DIM) * (1 + step % 3)
    return sum(((r.tanh() - target) ** 2).sum() + (r[:, :1] * r).sum() for r in rows) + 0.0 * step  # type: ignore


def train(
    mode: str,
    optimizer: fs_embed.optim.RowOptimizer,
    *,
    num_steps: int = 50,
    num_lookups: int = 1,
    check_versions: bool = False,
    announce: str = "all",
    seed: int = 0,
) -> Run:
    """`announce`: "all" batches, "none", or "odd" ones only, so that hits and misses alternate."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    model = fs_embed.prioritize(
        make_model(),
        optimizer=optimizer,
        mode=mode,
        timeout_s=30.0,
        check_versions=check_versions,  # type: ignore
    )
    table = model.table
    todo = batches(rank, num_steps, num_lookups=num_lookups, seed=seed)

    def prefetch(step: int) -> None:
        if announce == "all" or (announce == "odd" and step % 2):
            table.prefetch(todo[step] if step < num_steps else None)

    losses: list[float] = []
    table.flush()
    prefetch(0)
    for step in range(num_steps):
        prefetch(step + 1)
        loss = loss_of([table(ids) for ids in todo[step]], step)
        loss.backward()
        losses.append(float(loss.detach()))
    weight = model.state_dict()["table.weight"]
    whole = weight.full_tensor() if dist.is_initialized() else weight.clone()
    if mode == "prioritized":
        stats = table.stats()
        expected = {"all": (num_steps, 0), "none": (0, num_steps)}.get(announce)
        assert expected is None or (stats["hits"], stats["misses"]) == expected, stats
    table.tables.close()
    return Run(losses, whole)
