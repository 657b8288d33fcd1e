"""The process group: errors that name ranks, no wait without an end, and its name in torch.distributed."""

import gc
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import fs_comm
from tests.ranks import RankPool

Ranks = Callable[[int], RankPool]


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


def test_a_job_can_begin_by_the_backends_name() -> None:
    launch = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    script = Path(__file__).with_name("by_name.py")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "1"}
    done = subprocess.run((*launch, script), env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert "rank 0 is done" in done.stdout
    assert "rank 1 is done" in done.stdout


def _subgroup() -> list[str]:
    alone = fs_comm.new_group([0], transports=("gloo",), timeout_s=20.0)
    later = dist.new_group(backend="smfree")
    assert isinstance(later, fs_comm.SmFreeGroup)
    member = isinstance(alone, fs_comm.SmFreeGroup)
    return ["member" if member else str(alone == dist.GroupMember.NON_GROUP_MEMBER), later.transport]


def test_a_rank_outside_is_told_so_and_a_groups_transports_are_its_own(ranks: Ranks) -> None:
    assert ranks(2).run(_subgroup) == [["member", "shm"], ["True", "shm"]]
