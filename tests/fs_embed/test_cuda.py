"""On a GPU: the bits of synchronous mode with exchanges on a stream of their own, and the numbers of the CPU."""

import pytest
import torch
import torch.distributed as dist

import fs_embed
from fs_embed.optim import RowOptimizer
from tests.fs_embed.test_parity import OPTIMIZERS
from tests.fs_embed.training import Run

pytestmark = pytest.mark.gpu

ROWS, DIM = 5_000, 32


def train(mode: str, optimizer: RowOptimizer, device: str, num_steps: int = 50) -> Run:
    """Ids with repeats that fill most of the table, so that steps share rows, and dense work to overlap with."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    weight = torch.randn(ROWS, DIM, generator=torch.Generator().manual_seed(0)).to(device)
    dense = torch.eye(DIM, device=device)
    table = fs_embed.PrioritizedEmbedding(weight, optimizer=optimizer, mode=mode, timeout_s=60.0)  # type: ignore
    g = torch.Generator().manual_seed(rank)
    sizes = [0 if i % 7 == 3 else int(torch.randint(1, 6_000, (), generator=g)) for i in range(num_steps)]
    batches = [(torch.rand(n, generator=g) ** 2 * ROWS).long().to(device) for n in sizes]
    losses: list[torch.Tensor] = []
    table.prefetch([batches[0]])
    for step, ids in enumerate(batches):
        table.prefetch([batches[step + 1]] if step + 1 < num_steps else None)
        rows = table(ids)
        for _ in range(4):
            rows = rows @ dense
        loss = (rows.tanh() ** 2).sum() / 100 + (rows[:, :1] * rows).sum() / 1000
        loss.backward()
        losses.append(loss.detach())
    if mode == "prioritized":
        assert table.stats()["misses"] == 0
    table.prefetch(None)
    table.flush()
    whole = table.state_dict()["weight"]
    whole = whole.full_tensor() if dist.is_initialized() else whole.clone()
    table.close()
    return Run([float(x) for x in losses], whole.cpu())


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_one_gpu_gives_the_bits_of_synchronous(name: str) -> None:
    found, expected = (train(mode, OPTIMIZERS[name], "cuda") for mode in ("prioritized", "synchronous"))
    assert found.losses == expected.losses
    assert torch.equal(found.table, expected.table)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_gpu_learns_what_the_cpu_learns(name: str) -> None:
    found, expected = (train("synchronous", OPTIMIZERS[name], device, 5) for device in ("cuda", "cpu"))
    # A few steps: products of another precision and order, which Adam's division by small roots makes larger.
    torch.testing.assert_close(found.table, expected.table, rtol=1e-2, atol=1e-3)


def test_a_tables_memory_is_not_reused_while_the_other_stream_reads_it() -> None:
    """Id tensors are dropped as soon as they are announced, and their memory is written over at once."""
    weight = torch.arange(float(ROWS), device="cuda")[:, None].expand(ROWS, DIM).contiguous()
    table = fs_embed.PrioritizedEmbedding(weight, optimizer=fs_embed.SGD(lr=0.0))
    g = torch.Generator().manual_seed(0)
    coming = torch.randint(ROWS, (4_000,), generator=g)
    ids = coming.cuda()
    table.prefetch([ids])
    for _ in range(30):
        now, expected = ids, coming
        coming = torch.randint(ROWS, (4_000,), generator=g)
        ids = coming.cuda()
        table.prefetch([ids])
        rows = table(now)
        del now
        junk = [torch.full((4_000,), -1, device="cuda") for _ in range(8)]
        assert torch.equal(rows.detach()[:, 0].cpu(), expected.float())
        rows.sum().backward()
        del rows, junk
    table.close()
