"""The process group over verbs: plain torch.distributed calls, bits as gloo's, faults by name."""

import os
import signal
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

import fs_comm
from tests.rdma.forks import run, run_outcomes
from tests.rdma.test_verbs_data import MIB, noise, use_gloo


def exchange_as_gloo(rank: int, store: Any, world_size: int) -> str:
    use_gloo(rank, store, world_size)
    group = fs_comm.new_group(transports=("verbs",), timeout_s=100)
    works: list[Any] = []
    checks: list[tuple[torch.Tensor, torch.Tensor]] = []
    for number, size in enumerate((1, 5000, 4 * MIB + 4)):  # with the headers, and by writes
        own = noise(size, number, rank)
        gathered = torch.empty(world_size, size, dtype=torch.uint8)
        works.append(dist.all_gather(list(gathered), own, group=group, async_op=True))
        expected = torch.empty_like(gathered)
        dist.all_gather(list(expected), own)
        checks.append((gathered, expected))

        sends = [(rank * 7 + p * size) % (2 * size) for p in range(world_size)]
        receives = [(p * 7 + rank * size) % (2 * size) for p in range(world_size)]
        data = noise(sum(sends), 10 + number, rank)
        out = torch.empty(sum(receives), dtype=torch.uint8)
        works.append(dist.all_to_all_single(out, data, receives, sends, group=group, async_op=True))
        expected = torch.empty_like(out)
        dist.all_to_all_single(expected, data, receives, sends)
        checks.append((out, expected))
    for work in works:
        work.wait()
    for found, expected in checks:
        assert torch.equal(found, expected)
    transport = group.transport  # pyright: ignore[reportAttributeAccessIssue]
    dist.barrier()
    group.shutdown()
    return transport


@pytest.mark.parametrize("world_size", [2, 4])
def test_a_group_over_verbs_gives_gloos_bits(world_size: int, any_binding: list[str]):
    assert run(exchange_as_gloo, world_size, world_size) == ["verbs"] * world_size


def lose_a_rank(rank: int, store: Any, world_size: int) -> tuple[str, float]:
    use_gloo(rank, store, world_size)
    group = fs_comm.new_group(transports=("verbs",), timeout_s=60)
    data = torch.zeros(world_size * MIB, dtype=torch.uint8)
    out = torch.empty_like(data)
    dist.all_to_all_single(out, data, group=group)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    began = time.monotonic()
    with pytest.raises(fs_comm.PeerLost) as raised:
        dist.all_to_all_single(out, data, group=group)
    return str(raised.value), time.monotonic() - began


def test_a_rank_killed_between_operations_is_named_by_the_group(any_binding: list[str]):
    outcomes = run_outcomes(lose_a_rank, 3, 3)
    for rank in (0, 2):
        assert outcomes[rank].ok, outcomes[rank].error
        text, seconds = outcomes[rank].value
        assert "rank 1" in text
        assert seconds < 30


def use_a_wrong_gid(rank: int, store: Any) -> str:
    use_gloo(rank, store, 2)
    if rank == 0:
        os.environ["FS_COMM_VERBS_GID_INDEX"] = "77"
    with pytest.raises(fs_comm.CommError) as raised:
        fs_comm.new_group(transports=("verbs",), timeout_s=30)
    return str(raised.value)


def test_a_wrong_gid_is_told_by_all_ranks_when_the_group_is_made(any_binding: list[str]):
    for text in run(use_a_wrong_gid, 2):
        assert "no transport of ['verbs'] serves ranks 0 and 1 of the group: verbs: rank 0" in text
        assert "GID index 77 is not in use" in text
