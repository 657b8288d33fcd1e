"""The engine for device memory between real processes, where host memory and threads stand for device and streams.

So the whole protocol runs without a GPU, in both modes; what only a device can show is in test_cuda.py.
"""

import ctypes
import os
import queue
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
from fs_comm.staging import RING, WORD, Layout, share
from fs_comm.wire import DTYPE_NUMBER, Op
from tests.ranks import RankPool

Ranks = Callable[[int], RankPool]
LAYOUT = {size: Layout(size, 4096, 2) for size in (1, 2, 3)}
MODES = ["streams wait", "thread waits"]
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


class HostStreams(HostCopies):
    """The same with streams that are threads: each does what it was given in order, and waits for words by itself."""

    stream_waits = True

    def __init__(self) -> None:
        self._queues: list[queue.SimpleQueue[Callable[[], bool] | None]] = [queue.SimpleQueue() for _ in range(4)]
        self.threads = [threading.Thread(target=self._work, args=(q,), daemon=True) for q in self._queues]
        self._kept: list[Tensor] = []
        for thread in self.threads:
            thread.start()

    def _work(self, q: "queue.SimpleQueue[Callable[[], bool] | None]") -> None:
        while (step := q.get()) is not None:
            while not step():
                time.sleep(0.0001)

    def put(self, stream: int, address: int, device: int, num_bytes: int) -> None:
        self._queues[stream].put(lambda: bool(ctypes.memmove(address, device, num_bytes)))

    take = put

    def mark(self, stream: int) -> Any:
        reached = threading.Event()
        self._queues[stream].put(lambda: reached.set() is None)
        return Reached(reached)

    def join(self) -> None:
        for stream in range(3):
            self._queues[-1].put(self.mark(stream).query)

    def end(self) -> Any:
        return self.mark(-1)

    def keep(self, tensor: Tensor, *, puts: bool) -> None:
        self._kept.append(tensor)

    def wait_until_at_least(self, stream: int, word: int, count: int) -> None:
        at = ctypes.c_uint32.from_address(word)
        self._queues[stream].put(lambda: (at.value - count) & WORD < 1 << 31)

    def wait_until_equal(self, stream: int, word: int, value: int) -> None:
        at = ctypes.c_uint32.from_address(word)
        self._queues[stream].put(lambda: at.value == value)

    def write(self, stream: int, word: int, value: int) -> None:
        self._queues[stream].put(lambda: bool(ctypes.memmove(word, (value & WORD).to_bytes(4, "little"), 4)))

    def close(self) -> None:
        """As streams that are waited for: what they were given must end."""
        for q, thread in zip(self._queues, self.threads, strict=True):
            q.put(None)
            thread.join(10)


class Reached:
    def __init__(self, reached: threading.Event) -> None:
        self._reached = reached

    def query(self) -> bool:
        return self._reached.is_set()


def engine(mode: str, timeout_s: float = 20.0) -> CudaEngine:
    global _made
    _made += 1  # the same on all ranks of a pool
    rank, size = dist.get_rank(), dist.get_world_size()
    store = PrefixStore(f"engine{_made}", dist.distributed_c10d._get_default_store())
    mesh = Mesh(store, rank, size, timeout_s=timeout_s, name_of=lambda r: f"rank {r}")
    regions = share(LAYOUT[size], rank, mesh.sockets, timeout_s)
    for region in regions:
        region.device_address = region.address
    if mode == "mixed":  # they need not agree
        mode = MODES[rank % 2]
    copies = HostStreams() if mode == "streams wait" else HostCopies()
    return CudaEngine(mesh, LAYOUT[size], regions, copies, torch.device("cpu"), timeout_s=timeout_s)


def close(e: CudaEngine) -> None:
    e.close()
    if isinstance(e.copies, HostStreams):
        assert not any(thread.is_alive() for thread in e.copies.threads), "a stream was left waiting"


def all_to_all(e: CudaEngine, sends: list[Tensor], receives: list[Tensor]) -> Job:
    return e.submit(Op.ALL_TO_ALL, DTYPE_NUMBER[sends[0].dtype], sends, receives, None)


def wait(job: Job) -> None:
    assert job.given.wait(30)
    while job.error is None and not (job.event is not None and job.event.query()):
        time.sleep(0.0002)
    if job.error is not None:
        raise job.error


def _uneven(mode: str) -> None:
    rank, size, e = dist.get_rank(), dist.get_world_size(), engine(mode)
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


@pytest.mark.parametrize(
    ("size", "mode"), [(1, "streams wait"), (2, "streams wait"), (2, "thread waits"), (3, "mixed")]
)
def test_uneven_parts_arrive_over_slots_used_again_and_again(ranks: Ranks, size: int, mode: str) -> None:
    ranks(size).run(_uneven, mode)


def _more_than_the_ring(mode: str) -> int:
    e, n = engine(mode), RING + 50
    outs = [[torch.full((1,), -1), torch.full((1,), -1)] for _ in range(n)]
    jobs = [all_to_all(e, [torch.full((1,), k)] * 2, outs[k]) for k in range(n)]
    for job in jobs:
        wait(job)
    assert all(int(o[p]) == k for k, o in enumerate(outs) for p in (0, 1))
    e.close()
    return threading.active_count()


@pytest.mark.parametrize("mode", MODES)
def test_more_operations_than_the_ring_holds_wait_for_room(ranks: Ranks, mode: str) -> None:
    ranks(2).run(_more_than_the_ring, mode)


def _disagree(how: str, mode: str) -> str:
    e, rank = engine(mode, timeout_s=2.0), dist.get_rank()
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
        close(e)
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
@pytest.mark.parametrize("mode", MODES)
def test_ranks_that_disagree_get_an_error_that_names_them(ranks: Ranks, how: str, text: str, mode: str) -> None:
    found = ranks(2).run(_disagree, how, mode)
    assert all(re.search(text, t) for t in found), found
    assert "no error" not in found


def _killed(large: bool, mode: str) -> tuple[str, float]:
    e, n = engine(mode, timeout_s=30.0), 1_000_000 if large else 1
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
        seconds = time.monotonic() - started
        close(e)
        return str(error), seconds
    return "no error", 0.0


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("large", [False, True])
def test_a_killed_rank_is_named_at_once(ranks: Ranks, large: bool, mode: str) -> None:
    first, second = ranks(2).outcomes(_killed, large, mode)
    assert second.exitcode == -signal.SIGKILL
    assert "rank 1 is lost: its process has ended" in first.value[0]
    assert first.value[1] < 10


def _one_leaves_early(mode: str) -> None:
    e, rank = engine(mode), dist.get_rank()
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


@pytest.mark.parametrize("mode", MODES)
def test_a_rank_that_shut_down_is_named_to_those_that_go_on(ranks: Ranks, mode: str) -> None:
    ranks(2).run(_one_leaves_early, mode)


def _abort(mode: str) -> str:
    e = engine(mode)
    job = all_to_all(e, [torch.zeros(1)] * 2, [torch.zeros(1), torch.zeros(1)]) if dist.get_rank() else None
    time.sleep(0.2)
    if job is None:
        e.abort()
        return "aborted"
    with pytest.raises(fs_comm.CommError) as found:
        wait(job)
    e.close()
    return str(found.value)


@pytest.mark.parametrize("mode", MODES)
def test_an_abort_fails_what_is_under_way_at_the_peers(ranks: Ranks, mode: str) -> None:
    assert re.search(r"rank 0 gave the group up: .*aborted", ranks(2).run(_abort, mode)[1])


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
