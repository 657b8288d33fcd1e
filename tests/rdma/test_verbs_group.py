"""The process group over verbs: plain torch.distributed calls, bits as gloo's, faults by name."""

import os
import signal
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

import fs_comm
from tests.fs_comm import transport_suite
from tests.rdma.forks import run, run_outcomes
from tests.rdma.test_verbs_data import MIB, use_gloo


def pass_the_suite(rank: int, store: Any, world_size: int, num_hosts: int) -> tuple[str, int]:
    """As for the other transports; with two `hosts`, half of the ranks say that they are on the second."""
    use_gloo(rank, store, world_size)
    if num_hosts == 2:
        os.environ["FS_COMM_HOST"] = f"host {2 * rank // world_size}"
    transports = ("verbs",) if num_hosts == 1 else ("shm", "verbs")
    group = fs_comm.new_group(transports=transports, timeout_s=100)
    assert isinstance(group, fs_comm.SmFreeGroup)
    for case in transport_suite.CASES:
        if case is transport_suite.large_parts:  # software RoCE is slow: all pairs together move this
            transport_suite.large_parts(group, (64 if world_size == 2 else 4) * MIB)
        else:
            case(group)
    routes = {route.transport for route in group.routes.values()}
    dist.barrier()
    group.shutdown()
    return group.transport, len(routes)


@pytest.mark.parametrize("world_size", [2, 4])
def test_a_group_over_verbs_gives_gloos_bits(world_size: int, any_binding: list[str]):
    outcomes = run(pass_the_suite, world_size, world_size, 1, timeout_s=400)
    assert outcomes == [("verbs", 1)] * world_size


def test_ranks_of_a_host_meet_in_memory_and_others_by_verbs(any_binding: list[str]):
    assert run(pass_the_suite, 4, 4, 2, timeout_s=400) == [("shm+verbs", 2)] * 4


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
