"""The engine for device memory between real processes, with copies by the processor: the protocol without a GPU.

What the streams do by themselves is in test_cuda.py.
"""

import ctypes
import os
import re
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore

import fs_comm
from fs_comm.cuda_engine import CudaEngine
from fs_comm.cuda_job import Job
from fs_comm.cuda_pinned import PinnedEngine
from fs_comm.mesh import Mesh
from fs_comm.staging import RING, Layout, share
from fs_comm.wire import DTYPE_NUMBER, Op
from tests.ranks import RankPool

Ranks = Callable[[int], RankPool]
LAYOUT = {size: Layout(size, 4096, 2) for size in (1, 2, 3)}
_made = 0


class Done:
    def query(self) -> bool:
        return True


class HostCopies:
    """`CudaCopies` where the device is the host, and every copy is done at once."""

    stream_waits, num_streams, last = False, 2, None

    def use_in_thread(self) -> None: ...
    def mark_caller(self) -> None: ...
    def begin(self, after: Any) -> None: ...
    def join(self) -> None: ...
    def keep(self, tensor: Tensor, *, puts: bool) -> None: ...
    def close(self) -> None: ...

    def put(self, stream: int, address: int, device: int, num_bytes: int) -> None:
        ctypes.memmove(address, device, num_bytes)

    take = put

    def mark(self, stream: int) -> Done:
        return Done()

    def end(self) -> Done:
        return Done()

    def wait_until_at_least(self, stream: int, word: int, count: int) -> None:
        raise AssertionError("streams of the host do not wait")

    wait_until_equal = write = wait_until_at_least


def engine(timeout_s: float = 20.0) -> CudaEngine:
    global _made
    _made += 1  # the same on all ranks of a pool
    rank, size = dist.get_rank(), dist.get_world_size()
    store = PrefixStore(f"engine{_made}", dist.distributed_c10d._get_default_store())
    mesh = Mesh(store, rank, size, timeout_s=timeout_s, name_of=lambda r: f"rank {r}")
    regions = share(LAYOUT[size], rank, mesh.sockets, timeout_s)
    return CudaEngine(mesh, LAYOUT[size], regions, HostCopies(), torch.device("cpu"), timeout_s=timeout_s)


def all_to_all(e: CudaEngine, sends: list[Tensor], receives: list[Tensor]) -> Job:
    return e.submit(Op.ALL_TO_ALL, DTYPE_NUMBER[sends[0].dtype], sends, receives, None)


def wait(job: Job) -> None:
    assert job.given.wait(30)
    if job.error is not None:
        raise job.error


def _uneven() -> None:
    rank, size, e = dist.get_rank(), dist.get_world_size(), engine()
    for n in range(40):
        rows = [[(r * 7 + p * 3 + n) % 5 * (1, 3000)[n % 2] for p in range(size)] for r in range(size)]
        sends = [torch.arange(rows[rank][p]) * size * size + size * rank + p for p in range(size)]
        receives = [torch.full((rows[p][rank],), -1) for p in range(size)]
        same = [torch.full((3000,), -1) for _ in range(size)]
        job = all_to_all(e, sends, receives)
        wait(e.submit(Op.ALL_GATHER, DTYPE_NUMBER[torch.int64], [torch.arange(3000) + rank] * size, same, None))
        wait(job)
        for p in range(size):
            assert torch.equal(receives[p], torch.arange(rows[p][rank]) * size * size + size * p + rank)
            assert torch.equal(same[p], torch.arange(3000) + p)
    e.close()
    e.close()
    with pytest.raises(fs_comm.GroupClosed):
        all_to_all(e, [torch.zeros(1)] * size, [torch.zeros(1)] * size)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_uneven_parts_arrive_over_slots_used_again_and_again(ranks: Ranks, size: int) -> None:
    ranks(size).run(_uneven)


def _more_than_the_ring() -> int:
    e, n = engine(), RING + 50
    outs = [[torch.full((1,), -1), torch.full((1,), -1)] for _ in range(n)]
    jobs = [all_to_all(e, [torch.full((1,), k)] * 2, outs[k]) for k in range(n)]
    for job in jobs:
        wait(job)
    assert all(int(o[p]) == k for k, o in enumerate(outs) for p in (0, 1))
    e.close()
    return threading.active_count()


def test_more_operations_than_the_ring_holds_wait_for_room(ranks: Ranks) -> None:
    ranks(2).run(_more_than_the_ring)


def _disagree(how: str) -> str:
    e, rank = engine(timeout_s=2.0), dist.get_rank()
    two = [torch.zeros(2, dtype=(torch.int32 if how == "dtype" and rank else torch.float32)) for _ in range(4)]
    send = [torch.zeros(3 if how == "splits" and rank == 0 else 2, dtype=two[0].dtype) for _ in range(2)]
    try:
        if how == "absent" and rank:
            time.sleep(4)
            return ""
        if how == "operation" and rank:
            wait(e.submit(Op.ALL_GATHER, DTYPE_NUMBER[two[0].dtype], two[:1] * 2, two[2:], None))
        else:
            wait(all_to_all(e, send, two[2:]))
    except dist.DistBackendError as error:
        with pytest.raises(fs_comm.GroupClosed):
            all_to_all(e, two[:2], two[2:])
        return f"{type(error).__name__}: {error}"
    finally:
        e.close()
    return "no error"


@pytest.mark.parametrize(
    ("how", "text"),
    [
        (
            "splits",
            r"this rank has 12 bytes for rank 1, which expects 8|expects 8 bytes of rank 0, which has 12|has 12",
        ),
        ("dtype", r"of (int32|float32)"),
        ("operation", r"all_gather|all_to_all"),
        ("absent", r"CommTimeout: all_to_all of float32 \(number 1\): waited 2 s for rank 1|^$"),
    ],
)
def test_ranks_that_disagree_get_an_error_that_names_them(ranks: Ranks, how: str, text: str) -> None:
    found = ranks(2).run(_disagree, how)
    assert all(re.search(text, t) for t in found), found
    assert "no error" not in found


def _killed(large: bool) -> tuple[str, float]:
    e, n = engine(timeout_s=30.0), 1_000_000 if large else 1
    wait(all_to_all(e, [torch.zeros(1)] * 2, [torch.zeros(1), torch.zeros(1)]))
    if dist.get_rank() == 1:
        if large:  # in the middle of one
            all_to_all(e, [torch.zeros(n)] * 2, [torch.zeros(n), torch.zeros(n)])
        os.kill(os.getpid(), signal.SIGKILL)
    started = time.monotonic()
    try:
        for _ in range(1000):
            wait(all_to_all(e, [torch.zeros(n)] * 2, [torch.zeros(n), torch.zeros(n)]))
    except fs_comm.PeerLost as error:
        return str(error), time.monotonic() - started
    return "no error", 0.0


@pytest.mark.parametrize("large", [False, True])
def test_a_killed_rank_is_named_at_once(ranks: Ranks, large: bool) -> None:
    first, second = ranks(2).outcomes(_killed, large)
    assert second.exitcode == -signal.SIGKILL
    assert "rank 1 is lost: its process has ended" in first.value[0]
    assert first.value[1] < 10


def _one_leaves_early() -> None:
    e, rank = engine(), dist.get_rank()
    out = [torch.zeros(20_000), torch.zeros(20_000)]
    wait(all_to_all(e, [torch.full((20_000,), float(rank))] * 2, out))
    if rank == 0:
        e.close()  # has all it needs, and all it had was taken
    else:
        time.sleep(0.3)
        with pytest.raises(fs_comm.PeerLost, match="rank 0 is lost: it has shut its group down"):
            wait(all_to_all(e, out, out))
        e.close()
    assert [o[0].item() for o in out] == [0.0, 1.0]


def test_a_rank_that_shut_down_is_named_to_those_that_go_on(ranks: Ranks) -> None:
    ranks(2).run(_one_leaves_early)


def _abort() -> str:
    e = engine()
    job = all_to_all(e, [torch.zeros(1)] * 2, [torch.zeros(1), torch.zeros(1)]) if dist.get_rank() else None
    time.sleep(0.2)
    if job is None:
        e.abort()
        return "aborted"
    with pytest.raises(fs_comm.CommError) as found:
        wait(job)
    e.close()
    return str(found.value)


def test_an_abort_fails_what_is_under_way_at_the_peers(ranks: Ranks) -> None:
    assert re.search(r"rank 0 gave the group up: .*aborted", ranks(2).run(_abort)[1])


def _pinned() -> None:
    global _made
    _made += 1
    rank, size = dist.get_rank(), dist.get_world_size()
    group = fs_comm.new_group(transports=("gloo",), timeout_s=20.0)
    assert isinstance(group, fs_comm.SmFreeGroup)
    store = PrefixStore(f"pinned{_made}", dist.distributed_c10d._get_default_store())
    e = PinnedEngine(
        group._host_engine(("gloo",), store), rank, size, HostCopies(), torch.device("cpu"), timeout_s=20.0
    )
    e.segment_bytes = 40_000
    for n in range(12):
        rows = [[(r * 7 + p * 3 + n) % 5 * (1, 9000)[n % 2] for p in range(size)] for r in range(size)]
        sends = [torch.arange(rows[rank][p]) * size * size + size * rank + p for p in range(size)]
        receives = [torch.full((rows[p][rank],), -1) for p in range(size)]
        same = [torch.full((30_000,), -1) for _ in range(size)]
        job = e.submit(Op.ALL_TO_ALL, DTYPE_NUMBER[torch.int64], sends, receives, None)
        dist.all_gather(list(torch.empty(size, 1)), torch.zeros(1), group=group)  # in any order with them
        wait(e.submit(Op.ALL_GATHER, DTYPE_NUMBER[torch.int64], [torch.arange(30_000) + rank] * size, same, None))
        wait(job)
        for p in range(size):
            assert torch.equal(receives[p], torch.arange(rows[p][rank]) * size * size + size * p + rank)
            assert torch.equal(same[p], torch.arange(30_000) + p)
    parts = [torch.zeros(2).long(), torch.zeros(3 if rank == 0 else 2).long()]
    bad = e.submit(Op.ALL_TO_ALL, DTYPE_NUMBER[torch.int64], parts, [torch.zeros(2).long()] * size, None)
    with pytest.raises(fs_comm.CommError, match=r"has 24 bytes|which has 24|gave the group up"):
        wait(bad)
    with pytest.raises(fs_comm.GroupClosed):
        e.submit(Op.ALL_TO_ALL, DTYPE_NUMBER[torch.int64], sends, receives, None)
    e.close()
    e.close()
    dist.destroy_process_group(group)


def test_segments_over_roads_of_the_cpu_bring_every_part(ranks: Ranks) -> None:
    ranks(2).run(_pinned)
