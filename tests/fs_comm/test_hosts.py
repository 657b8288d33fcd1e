"""Groups over two hosts: shared memory within, gloo between, and a cable that is pulled."""

import os
import time

import pytest
import torch
import torch.distributed as dist

import fs_comm
from fs_comm.mesh import Mesh
from tests.fs_comm.hosts import TwoHosts, begun, why_not


@pytest.fixture(scope="module", autouse=True)
def _possible() -> None:
    if (reason := why_not()) is not None:
        pytest.skip(reason)


def _group(timeout_s: float) -> fs_comm.SmFreeGroup:
    group = fs_comm.new_group(transports=("shm", "gloo"), timeout_s=timeout_s)
    assert isinstance(group, fs_comm.SmFreeGroup)
    return group


def _exchange_as_gloo() -> dict[int, str]:
    group, rank, size = _group(30.0), dist.get_rank(), dist.get_world_size()
    for scale in (10, 5_000, 700_000):  # with the headers, both, and by the roads
        rows = [[(r * 5 + p * 3) % 7 * scale for p in range(size)] for r in range(size)]
        to_me = [rows[r][rank] for r in range(size)]
        mine = torch.randint(0, 255, (sum(rows[rank]),), dtype=torch.uint8)
        found, expected = (torch.empty(sum(to_me), dtype=torch.uint8) for _ in range(2))
        work = dist.all_to_all_single(found, mine, to_me, rows[rank], group=group, async_op=True)
        block = torch.randint(0, 255, (scale,), dtype=torch.uint8)
        gathered, as_gloo = ([torch.empty_like(block) for _ in range(size)] for _ in range(2))
        dist.all_gather(gathered, block, group=group)
        dist.all_gather(as_gloo, block)
        dist.all_to_all_single(expected, mine, to_me, rows[rank])
        assert work is not None
        assert work.wait()
        assert torch.equal(found, expected)
        assert torch.equal(torch.cat(gathered), torch.cat(as_gloo))
    dist.barrier(group)
    return {peer: route.transport for peer, route in group.routes.items()}


def test_ranks_of_a_host_meet_in_memory_and_others_over_the_network() -> None:
    with TwoHosts() as hosts:
        outcomes = hosts.outcomes(_exchange_as_gloo)
    for rank, outcome in enumerate(outcomes):
        assert outcome.ok, outcome.error
        expected = {p: "shm" if p // 2 == rank // 2 else "gloo" for p in range(4) if p != rank}
        assert outcome.value == expected


def _meet_by_the_store_alone() -> list[str]:
    for name in ("MASTER_ADDR", "GLOO_SOCKET_IFNAME"):
        os.environ.pop(name, None)
    store = dist.TCPStore("10.78.0.1", 29_501, 2, is_master=dist.get_rank() == 0)  # pyright: ignore
    mesh = Mesh(
        dist.PrefixStore("group", store), dist.get_rank(), 2, timeout_s=20.0, name_of=lambda rank: f"rank {rank}"
    )
    try:
        return [s.getpeername()[0] for s in mesh.sockets.values()]
    finally:
        dist.barrier()  # the first rank has the store
        mesh.close(None)


def test_hosts_of_a_job_that_began_by_the_address_of_a_store_find_each_other() -> None:
    with TwoHosts() as hosts:
        first, second = hosts.outcomes(_meet_by_the_store_alone, ranks_per_host=1)
    assert (first.value, second.value) == (["10.78.0.2"], ["10.78.0.1"]), (first, second)


def _be_cut_off(op: str) -> tuple[str, str, float, str]:
    group, size = _group(4.0), dist.get_world_size()
    mine = torch.zeros(4 << 20, dtype=torch.uint8)
    outs = [torch.empty_like(mine) for _ in range(size)]
    dist.barrier(group)
    begun()
    started = time.monotonic()
    try:
        if op == "all_gather":
            dist.all_gather(outs, mine, group=group)
        else:
            dist.all_to_all(outs, [mine] * size, group=group)
    except fs_comm.CommError as error:
        seconds = time.monotonic() - started
        try:
            dist.all_gather(outs, mine, group=group)
        except fs_comm.GroupClosed as closed:
            return type(error).__name__, str(error), seconds, str(closed)
    return "no error", "", 0.0, ""


@pytest.mark.parametrize("op", ["all_gather", "all_to_all"])
def test_both_sides_of_a_pulled_cable_get_the_error_within_the_timeout(op: str) -> None:
    with TwoHosts(rate="50mbit") as hosts:  # 16 MB each way take 2.7 s
        outcomes = hosts.outcomes(_be_cut_off, op, meanwhile=lambda: (time.sleep(0.5), hosts.unplug()))
    for rank, outcome in enumerate(outcomes):
        assert outcome.ok, outcome.error
        kind, text, seconds, after = outcome.value
        assert kind == "CommTimeout", text  # who waits last may hear of it from its neighbour
        assert op in text, text
        assert f"rank {(rank // 2 * 2 + 2) % 4}" in text or "gave the group up" in text, text
        assert seconds < 4.0 + 3.0
        assert "failed before" in after
