"""The process group: the same bits as gloo's for every spelling, errors that name ranks, and no wait without an end."""

import gc
import os
import re
import signal
import threading
import time
from collections.abc import Callable
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

import fs_comm
from tests.ranks import RankPool

Ranks = Callable[[int], RankPool]
DTYPES = [torch.float32, torch.int64, torch.bool, torch.bfloat16, torch.complex64, torch.float8_e4m3fn, torch.uint8]


def random(*shape: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    g = torch.Generator().manual_seed(seed)
    raw = torch.randint(0, 2 if dtype == torch.bool else 120, shape, generator=g)
    return raw.to(dtype)


def group_for(road: str) -> dist.ProcessGroup:
    os.environ["FS_COMM_ATTACH"] = "0" if road == "staged" else "1"
    group = fs_comm.new_group(transports=("gloo",) if road == "gloo" else ("shm",), timeout_s=20.0)
    assert isinstance(group, fs_comm.SmFreeGroup)
    assert group.road == road
    return group


def _every_spelling(road: str) -> None:
    group, gloo = group_for(road), dist.group.WORLD
    rank, size = dist.get_rank(), dist.get_world_size()
    for n, dtype in enumerate(DTYPES):
        rows = [[(r * 7 + p * 3 + n) % 5 * (1, 2000)[n % 2] for p in range(size)] for r in range(size)]  # r sends to p
        rows[0][size - 1] = 0
        mine = random(sum(rows[rank]), 3, dtype=dtype, seed=rank)
        to_me = [rows[r][rank] for r in range(size)]
        found, expected = (torch.empty(sum(to_me), 3, dtype=dtype) for _ in range(2))
        dist.all_to_all_single(found, mine, to_me, rows[rank], group=group)
        wide = dtype if dtype not in (torch.float8_e4m3fn, torch.bfloat16, torch.complex64) else torch.uint8
        dist.all_to_all_single(expected.view(wide), mine.view(wide), to_me, rows[rank], group=gloo)
        assert torch.equal(found.view(torch.uint8), expected.view(torch.uint8)), dtype

        lists = [torch.empty(k, 3, dtype=dtype) for k in to_me]
        dist.all_to_all(lists, list(mine.split(rows[rank])), group=group)
        assert torch.equal(torch.cat(lists).view(torch.uint8), expected.view(torch.uint8)), dtype

        same = random(5000, dtype=dtype, seed=100 + rank)
        parts = [torch.empty_like(same) for _ in range(size)]
        dist.all_gather(parts, same, group=group)
        whole = torch.empty(5000 * size, dtype=dtype)
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        gather(whole, same, group=group)
        for r in range(size):
            assert torch.equal(parts[r].view(torch.uint8), random(5000, dtype=dtype, seed=100 + r).view(torch.uint8))
        assert torch.equal(whole.view(torch.uint8), torch.cat(parts).view(torch.uint8))
    x = torch.tensor([float(rank)])
    dist.all_reduce(x, group=group)
    assert x.item() == sum(range(size))
    dist.barrier(group)
    dist.destroy_process_group(group)


@pytest.mark.parametrize("road", ["attach", "staged", "gloo"])
@pytest.mark.parametrize("size", [2, 3])
def test_every_spelling_gives_gloos_bits(ranks: Ranks, size: int, road: str) -> None:
    ranks(size).run(_every_spelling, road)


def _large_and_odd(road: str) -> None:
    group = group_for(road)
    rank, size = dist.get_rank(), dist.get_world_size()
    rows = [[1 + 3_000_000 * (r == 0) * (p == 1) for p in range(size)] for r in range(size)]
    mine = torch.arange(sum(rows[rank]), dtype=torch.float32) + rank
    to_me = [rows[r][rank] for r in range(size)]
    out = torch.empty(sum(to_me))
    dist.all_to_all_single(out, mine, to_me, rows[rank], group=group)
    if rank == 1:
        assert torch.equal(out[: rows[0][1]], torch.arange(1, 1 + rows[0][1], dtype=torch.float32))
    strided = torch.arange(2 * 4 * size).view(-1, 2)[:, 0]
    out = torch.full((4 * size, 2), -1)
    dist.all_to_all_single(out[:, 1], strided, group=group)
    assert (out[:, 0] == -1).all()
    assert torch.equal(out[:, 1], strided.view(size, -1)[rank].repeat(size))
    works = []
    outs = [torch.empty(size * 100) for _ in range(64)]
    for k, o in enumerate(outs):
        works.append(dist.all_to_all_single(o, torch.full((size * 100,), float(k)), group=group, async_op=True))
    assert all(w.wait() for w in reversed(works))
    assert all(w.is_completed() for w in works)
    assert all((o == k).all() for k, o in enumerate(outs))
    assert works[0].get_future().wait()[0] is outs[0]
    dist.destroy_process_group(group)


@pytest.mark.parametrize("road", ["attach", "staged", "gloo"])
def test_large_strided_and_many_at_once(ranks: Ranks, road: str) -> None:
    ranks(2).run(_large_and_odd, road)


def _disagree(how: str) -> str:
    group, rank = fs_comm.new_group(timeout_s=3.0), dist.get_rank()
    try:
        if how == "splits":
            splits = [2, 3] if rank == 0 else [2, 2]
            dist.all_to_all_single(torch.empty(4), torch.zeros(sum(splits)), [2, 2], splits, group=group)
        elif how == "dtype":
            dist.all_to_all_single(
                *(torch.zeros(2, dtype=(torch.float32, torch.int32)[rank]) for _ in range(2)), group=group
            )
        elif how == "operation" and rank == 0:
            dist.all_gather([torch.empty(2), torch.empty(2)], torch.zeros(2), group=group)
        elif how == "operation":
            dist.all_to_all_single(torch.empty(2), torch.zeros(2), group=group)
        elif how == "absent" and rank == 0:
            dist.all_to_all_single(torch.empty(2), torch.zeros(2), group=group)
        elif how == "absent":
            time.sleep(5)
            return ""
    except dist.DistBackendError as error:
        try:
            dist.all_to_all_single(torch.empty(2), torch.zeros(2), group=group)
        except fs_comm.GroupClosed:
            return f"{type(error).__name__}: {error}"
    return "no error"


@pytest.mark.parametrize(
    ("how", "text"),
    [
        ("splits", r"(this rank has 12 bytes for rank 1, which expects 8)|(expects 8 bytes of rank 0, which has 12)"),
        ("dtype", r"of (int32|float32)"),
        ("operation", r"all_gather|all_to_all"),
        ("absent", r"CommTimeout: all_to_all of float32 \(number 1\): waited 3 s for rank 1|^$"),
    ],
)
def test_ranks_that_disagree_get_an_error_that_names_them(ranks: Ranks, how: str, text: str) -> None:
    found = ranks(2).run(_disagree, how)
    assert all(re.search(text, t) for t in found), found
    assert "no error" not in found


def _die_in_the_middle(how: int) -> tuple[str, dict[int, str], float]:
    group, rank = fs_comm.new_group(timeout_s=30.0), dist.get_rank()
    dist.all_to_all_single(torch.empty(2), torch.zeros(2), group=group)
    if rank == 1:
        os.kill(os.getpid(), how)
    started = time.monotonic()
    try:
        dist.all_to_all_single(torch.empty(2), torch.zeros(2), group=group)
    except fs_comm.PeerLost as error:
        return str(error), fs_comm.lost_ranks(timeout_s=5.0), time.monotonic() - started
    return "no error", {}, 0.0


def test_a_killed_rank_is_named_at_once(ranks: Ranks) -> None:
    first, second = ranks(2).outcomes(_die_in_the_middle, signal.SIGKILL)
    assert second.exitcode == -signal.SIGKILL
    text, lost, seconds = first.value
    assert "rank 1 is lost" in text
    assert lost == {1: "its process has ended"}  # known after the group has closed its connections, too
    assert seconds < 10


def _lost_while_idle() -> dict[int, str]:
    fs_comm.new_group(timeout_s=30.0)
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return fs_comm.lost_ranks(timeout_s=10.0)


def test_a_rank_that_dies_is_known_without_an_operation(ranks: Ranks) -> None:
    first, _ = ranks(2).outcomes(_lost_while_idle)
    assert first.value == {1: "its process has ended"}


def _stopped_while_idle() -> dict[int, str]:
    group = fs_comm.new_group(timeout_s=30.0)
    pids = [torch.zeros(1, dtype=torch.int64) for _ in range(2)]
    dist.all_gather(pids, torch.tensor([os.getpid()]), group=group)
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
        return fs_comm.lost_ranks()
    try:
        return fs_comm.lost_ranks(timeout_s=10.0)
    finally:
        os.kill(int(pids[1]), signal.SIGCONT)


def test_a_stopped_rank_is_named_as_long_as_it_is_stopped(ranks: Ranks) -> None:
    assert ranks(2).run(_stopped_while_idle) == [{1: "its process is stopped, by a signal or a debugger"}, {}]


def _leaves_nothing() -> tuple[int, int]:
    def count() -> tuple[int, int]:
        gc.collect()
        return len(os.listdir("/proc/self/fd")), threading.active_count()

    def once() -> None:
        group = fs_comm.new_group(timeout_s=20.0)
        dist.all_to_all_single(torch.empty(200_000), torch.zeros(200_000), group=group)
        dist.destroy_process_group(group)

    once()
    before = count()
    for _ in range(5):
        once()
    after = count()
    return after[0] - before[0], after[1] - before[1]


def test_groups_leave_no_descriptor_and_no_thread(ranks: Ranks) -> None:
    for fds, threads in ranks(2).run(_leaves_nothing):
        assert threads <= 0
        assert fds <= 5  # gloo keeps what it keeps of its inner groups


def _wrong_arguments() -> list[str]:
    group, texts = fs_comm.new_group(timeout_s=20.0), []
    for call in (
        lambda: dist.all_to_all_single(torch.empty(4), torch.zeros(4), [1, 2], [2, 2], group=group),
        lambda: dist.all_to_all_single(torch.empty(3), torch.zeros(3), group=group),
        lambda: dist.all_gather([torch.empty(2)] * 2, torch.zeros(3), group=group),
    ):
        try:
            call()
        except (ValueError, RuntimeError) as error:
            texts.append(str(error))
    out = torch.empty(2)
    dist.all_to_all_single(out, torch.full((2,), float(dist.get_rank())), group=group)  # still of use
    assert out.tolist() == [0.0, 1.0]
    assert dist.all_to_all_single(out, out.clone(), group=group, async_op=True).wait(timedelta(seconds=5))
    return texts


def test_wrong_arguments_are_refused_before_anything_is_sent(ranks: Ranks) -> None:
    for texts in ranks(2).run(_wrong_arguments):
        assert len(texts) == 3
        assert "add up to 4 rows" in texts[0]
        assert "that 2 ranks divide, got 3" in texts[1]


def _usable_by_name() -> float:
    fs_comm.register()
    group = dist.new_group(backend="smfree")
    out = torch.empty(2)
    dist.all_gather_into_tensor(out, torch.tensor([float(dist.get_rank())]), group=group)
    return float(out.sum())


def test_the_backend_is_known_by_name(ranks: Ranks) -> None:
    assert ranks(2).run(_usable_by_name) == [1.0, 1.0]
