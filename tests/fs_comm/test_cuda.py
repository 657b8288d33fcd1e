"""CUDA tensors, by two and four processes, on as many GPUs as there are: one does."""

import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

import fs_comm
from tests.ranks import RankPool

pytestmark = pytest.mark.gpu

Ranks = Callable[[int], RankPool]
MODES = ["streams wait", "thread waits", "pinned"]
DTYPES = [torch.float32, torch.int64, torch.bool, torch.bfloat16, torch.complex64, torch.float8_e4m3fn, torch.uint8]
MIB = 1 << 20


def group_for(mode: str, timeout_s: float = 30.0) -> fs_comm.SmFreeGroup:
    os.environ["FS_COMM_STREAM_WAITS"] = "0" if mode == "thread waits" else "1"
    torch.cuda.set_device(dist.get_rank() % torch.cuda.device_count())
    transports = ("gloo",) if mode == "pinned" else ("shm", "verbs", "gloo")  # as between hosts
    group = fs_comm.new_group(transports=transports, timeout_s=timeout_s)
    assert isinstance(group, fs_comm.SmFreeGroup)
    gather(torch.empty(dist.get_world_size(), device="cuda"), torch.zeros(1, device="cuda"), group=group)
    assert group.cuda_mode == mode
    return group


def gather(out: torch.Tensor, x: torch.Tensor, **kwargs: Any) -> Any:
    return (getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor)(out, x, **kwargs)


def random(*shape: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    g = torch.Generator().manual_seed(seed)
    return torch.randint(0, 2 if dtype == torch.bool else 120, shape, generator=g).to(dtype)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.cpu().contiguous().view(torch.uint8), b.cpu().contiguous().view(torch.uint8))


def _every_spelling(mode: str) -> None:
    group, rank, size = group_for(mode), dist.get_rank(), dist.get_world_size()
    for n, dtype in enumerate(DTYPES):
        rows = [[(r * 7 + p * 3 + n) % 5 * (1, 2000, 700_000)[n % 3] for p in range(size)] for r in range(size)]
        rows[0][size - 1] = 0
        parts = [[random(rows[r][p], 3, dtype=dtype, seed=10 * r + p) for p in range(size)] for r in range(size)]
        mine, to_me = torch.cat(parts[rank]).cuda(), [rows[r][rank] for r in range(size)]
        expected = torch.cat([parts[r][rank] for r in range(size)])
        found = torch.empty(sum(to_me), 3, dtype=dtype, device="cuda")
        dist.all_to_all_single(found, mine, to_me, rows[rank], group=group)
        assert same_bits(found, expected), dtype
        lists = [torch.empty(k, 3, dtype=dtype, device="cuda") for k in to_me]
        dist.all_to_all(lists, list(mine.split(rows[rank])), group=group)
        assert same_bits(torch.cat(lists), expected), dtype

        same = [random(500_000, dtype=dtype, seed=100 + r) for r in range(size)]
        outs = [torch.empty(500_000, dtype=dtype, device="cuda") for _ in range(size)]
        dist.all_gather(outs, same[rank].cuda(), group=group)
        assert all(same_bits(a, b) for a, b in zip(outs, same, strict=True)), dtype
        whole = torch.empty(500_000 * size, dtype=dtype, device="cuda")
        gather(whole, same[rank].cuda(), group=group)
        assert same_bits(whole, torch.cat(same)), dtype
    x = torch.tensor([float(rank)], device="cuda")
    dist.all_reduce(x, group=group)  # by the inner group
    assert x.item() == sum(range(size))
    dist.destroy_process_group(group)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("size", [2, 4])
def test_every_spelling_brings_every_bit(ranks: Ranks, size: int, mode: str) -> None:
    ranks(size).run(_every_spelling, mode)


def _odd(mode: str) -> None:
    group, rank, size = group_for(mode), dist.get_rank(), dist.get_world_size()
    strided = torch.arange(2 * 40 * size, device="cuda").view(-1, 2)[:, 0]
    out = torch.full((40 * size, 2), -1, device="cuda")
    dist.all_to_all_single(out[:, 1], strided, group=group)
    assert (out[:, 0] == -1).all()
    assert torch.equal(out[:, 1], strided.view(size, -1)[rank].repeat(size))
    outs = [torch.empty(size * 1000, device="cuda") for _ in range(64)]
    works = [
        dist.all_to_all_single(o, torch.full((size * 1000,), float(k), device="cuda"), group=group, async_op=True)
        for k, o in enumerate(outs)
    ]
    assert all(w.wait() for w in reversed(works))
    assert all((o == k).all() for k, o in enumerate(outs))
    assert works[-1].wait(timedelta(seconds=20))
    assert all(w.is_completed() and w.is_success() for w in works)
    assert works[0].get_future().wait()[0] is outs[0]
    nothing = torch.empty(0, device="cuda")
    dist.all_to_all_single(nothing, torch.empty(0, device="cuda"), group=group)
    with pytest.raises(ValueError, match="one device"):
        dist.all_to_all_single(torch.empty(2), torch.zeros(2, device="cuda"), group=group)
    dist.destroy_process_group(group)
    with pytest.raises((fs_comm.GroupClosed, ValueError)):
        dist.all_to_all_single(nothing, nothing, group=group)


@pytest.mark.parametrize("mode", MODES)
def test_strided_empty_and_many_at_once(ranks: Ranks, mode: str) -> None:
    ranks(2).run(_odd, mode)


def _over_two_gib(mode: str) -> None:
    group, rank, size = group_for(mode), dist.get_rank(), dist.get_world_size()
    n = (2 << 30) + 4097
    rows = [[n if (r, p) == (0, 1) else 1 for p in range(size)] for r in range(size)]
    g = torch.Generator("cuda").manual_seed(7)
    large = torch.randint(0, 256, (n + 1,), dtype=torch.uint8, device="cuda", generator=g)
    mine = large[: sum(rows[rank])]
    to_me = [rows[r][rank] for r in range(size)]
    out = torch.empty(sum(to_me), dtype=torch.uint8, device="cuda")
    dist.all_to_all_single(out, mine, to_me, rows[rank], group=group)
    if rank == 1:
        assert torch.equal(out[:n], large[1:])
    dist.destroy_process_group(group)


@pytest.mark.parametrize("mode", MODES)
def test_parts_of_more_than_two_gib(ranks: Ranks, mode: str) -> None:
    ranks(2).run(_over_two_gib, mode)


def _ordered(mode: str) -> list[bool]:
    group, rank, size = group_for(mode), dist.get_rank(), dist.get_world_size()
    n = 4 * MIB
    source, out = torch.zeros(n, device="cuda"), torch.zeros(n, device="cuda")
    source.fill_(0.0)
    out.mul_(2.0).add_(1.0)  # kernels of this test, loaded before streams wait
    torch.cuda.synchronize()
    late = []
    for k in range(20):
        torch.cuda._sleep(20_000_000)  # some 10 ms: the exchange must wait for what fills its input
        source.fill_(float(k + rank))
        work = dist.all_to_all_single(out, source, group=group, async_op=True)
        late.append(not work.is_completed())
        work.wait()
        out.mul_(2.0).add_(1.0)  # must wait for the exchange
        source.fill_(-5.0)  # must not be seen by the exchange
        expected = torch.cat([torch.full((n // size,), 2.0 * (k + p) + 1.0) for p in range(size)])
        assert torch.equal(out.cpu(), expected), k
        del work
    dist.destroy_process_group(group)
    return late


@pytest.mark.parametrize("mode", MODES)
def test_an_exchange_comes_after_what_was_queued_and_before_what_is(ranks: Ranks, mode: str) -> None:
    assert all(all(late) for late in ranks(2).run(_ordered, mode))


def _traced(mode: str) -> list[str]:
    group, size = group_for(mode), dist.get_world_size()
    source, out = torch.rand(8 * MIB, device="cuda"), torch.empty(8 * MIB, device="cuda")
    mine = source[: 8 * MIB // size].clone()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        dist.all_to_all_single(out, source, group=group)
        gather(out, mine, group=group)
        torch.cuda.synchronize()
    dist.destroy_process_group(group)
    return [str(e.name) for e in profile.events() or [] if e.device_type == torch.autograd.DeviceType.CUDA]


@pytest.mark.parametrize("mode", MODES)
def test_no_kernel_and_no_copy_within_the_device(ranks: Ranks, mode: str) -> None:
    for names in ranks(2).run(_traced, mode):
        assert sum("DtoH" in name for name in names) >= 2
        assert sum("HtoD" in name for name in names) >= 2
        assert not [name for name in names if not re.search("DtoH|HtoD|[Ss]ync|[Ee]vent|[Ww]ait", name)]


def _few_queues(connections: int) -> int:
    os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = str(connections)
    group, rank, size = group_for("streams wait"), dist.get_rank(), dist.get_world_size()
    a = torch.rand(1024, 1024, device="cuda")
    sources = [torch.full((16 * MIB,), float(rank + k), device="cuda") for k in range(2)]
    outs = [torch.empty(16 * MIB, device="cuda") for _ in range(8)]
    side = torch.cuda.Stream()
    for _ in range(3):
        works = []
        for k, out in enumerate(outs):
            works.append(dist.all_to_all_single(out, sources[k % 2], group=group, async_op=True))
            a = (a @ a).clamp(0, 1)
            with torch.cuda.stream(side):
                torch.rand(1024, 1024, device="cuda").erfinv().sum().item()  # the caller waits for its device
            if k % 3 == rank:
                works[-1].wait()
        for work in works:
            work.wait()
        for k, out in enumerate(outs):
            assert all((part == float(p + k % 2)).all() for p, part in enumerate(out.chunk(size)))
    torch.cuda.synchronize()
    return connections


@pytest.mark.parametrize("connections", [1, 8, 32])
def test_no_deadlock_with_few_hardware_queues(connections: int) -> None:
    pool = RankPool(2)  # processes without a device so far: the number is read once
    try:
        assert pool.run(_few_queues, connections, timeout_s=50.0) == [connections] * 2
    finally:
        pool.close()


def _first_kernels_behind() -> float:
    group, rank, size = group_for("streams wait"), dist.get_rank(), dist.get_world_size()
    source, out = torch.ones(MIB, device="cuda"), torch.zeros(MIB, device="cuda")
    torch.cuda.synchronize()
    if rank:
        time.sleep(1.0)
    dist.all_to_all_single(out, source, group=group)
    total = torch.special.bessel_j0(out).cumsum(0).sort().values.sum()  # kernels loaded behind a waiting stream
    assert total.isfinite()
    dist.destroy_process_group(group)
    return size


def test_kernels_that_are_loaded_behind_a_waiting_exchange_do_not_halt_it() -> None:
    pool = RankPool(2)
    try:
        pool.run(_first_kernels_behind, timeout_s=40.0)
    finally:
        pool.close()


def _killed(mode: str) -> tuple[str, str, float]:
    group, rank = group_for(mode), dist.get_rank()
    source, out = torch.ones(64 * MIB, device="cuda"), torch.zeros(64 * MIB, device="cuda")
    torch.cuda.synchronize()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    started, first = time.monotonic(), "no error"
    try:
        dist.all_to_all_single(out, source, group=group)
    except fs_comm.CommError as error:
        first = str(error)
    torch.cuda.synchronize()  # the stream was let go
    seconds = time.monotonic() - started
    try:
        while time.monotonic() < started + 20:
            dist.all_to_all_single(out, source, group=group)
            time.sleep(0.05)
    except fs_comm.CommError as error:
        return first, str(error), seconds
    return first, "no error", seconds


@pytest.mark.parametrize("mode", MODES)
def test_streams_that_wait_for_a_killed_rank_are_let_go_and_the_next_call_says_why(ranks: Ranks, mode: str) -> None:
    first, second = ranks(2).outcomes(_killed, mode)
    assert second.exitcode == -signal.SIGKILL
    now, then, seconds = first.value
    assert seconds < 10
    assert "rank 1 is lost" in then
    assert "rank 1 is lost" in now or mode == "streams wait"  # which learns of it later


def _disagree(mode: str, how: str) -> str:
    group, rank = group_for(mode, timeout_s=3.0), dist.get_rank()
    if how == "absent" and rank:
        time.sleep(5)
        return ""
    send = [2, 3] if how == "splits" and rank == 0 else [2, 2]
    dtype = torch.int32 if how == "dtype" and rank else torch.float32
    source, out = torch.zeros(sum(send), dtype=dtype, device="cuda"), torch.zeros(4, dtype=dtype, device="cuda")
    try:
        if how == "operation" and rank:
            work = gather(out, source[:2].clone(), group=group, async_op=True)
        else:
            work = dist.all_to_all_single(out, source, [2, 2], send, group=group, async_op=True)
        work.wait(timedelta(seconds=20))
    except fs_comm.CommError as error:
        torch.cuda.synchronize()
        with pytest.raises(fs_comm.GroupClosed):
            dist.all_to_all_single(out, out.clone(), group=group)
        return f"{type(error).__name__}: {error}"
    return "no error"


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("how", "text"),
    [
        ("splits", "has 12|which expects 8"),
        ("dtype", r"of (int32|float32)"),
        ("operation", r"all_gather|all_to_all"),
        ("absent", r"CommTimeout: all_to_all of float32 \(number \d+\): waited 3 s for rank 1|^$"),
    ],
)
def test_ranks_that_disagree_get_an_error_that_names_them(ranks: Ranks, mode: str, how: str, text: str) -> None:
    found = ranks(2).run(_disagree, mode, how)
    assert all(re.search(text, t) for t in found), found
    assert "no error" not in found


def _delays(mode: str) -> tuple[list[float], list[float], float]:
    """Seconds of a copy of 64 KiB to the device, alone and beside exchanges of 256 MiB, and of such an exchange."""
    group = group_for(mode)
    small, target = torch.zeros(64 << 10, dtype=torch.uint8).pin_memory(), torch.zeros(64 << 10, dtype=torch.uint8)
    target = target.cuda()
    source, out = torch.ones(64 * MIB, device="cuda"), torch.zeros(64 * MIB, device="cuda")
    side = torch.cuda.Stream()

    def delay() -> float:
        started = time.perf_counter()
        with torch.cuda.stream(side):
            target.copy_(small, non_blocking=True)
        side.synchronize()
        return time.perf_counter() - started

    def bulk() -> Iterator[Any]:
        for _ in range(8):
            work = dist.all_to_all_single(out, source, group=group, async_op=True)
            while not work.is_completed():
                yield work

    list(bulk())
    alone = [delay() for _ in range(200)]
    started = time.perf_counter()
    beside = [delay() for _ in bulk()]
    seconds = (time.perf_counter() - started) / 8
    dist.destroy_process_group(group)
    return alone, beside, seconds


@pytest.mark.parametrize("mode", MODES)
def test_a_small_copy_does_not_wait_for_a_bulk_exchange(ranks: Ranks, mode: str) -> None:
    for alone, beside, seconds in ranks(2).run(_delays, mode):
        alone.sort()
        beside.sort()
        report = [f"{1e6 * x[len(x) * q // 100]:.0f} us" for x in (alone, beside) for q in (50, 90)]
        print(f"{mode}: alone p50, p90; beside p50, p90: {report}; an exchange {1e3 * seconds:.1f} ms")
        assert beside[len(beside) // 2] < seconds / 4
