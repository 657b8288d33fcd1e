"""The process group: errors that name ranks, no wait without an end, and its name in torch.distributed."""

import gc
import os
import re
import signal
import subprocess
import sys
import threading
import time
import traceback
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
        lambda: dist.all_to_all_single(torch.zeros(1).expand(2), torch.zeros(2), group=group),
        lambda: dist.all_gather([torch.empty(2)] * 2, torch.zeros(2).to_sparse(), group=group),
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
        assert len(texts) == 5
        assert "add up to 4 rows" in texts[0]
        assert "that 2 ranks divide, got 3" in texts[1]
        assert "a place for each element, got shape [2], strides [0]" in texts[3]
        assert "must be dense, got a torch.sparse_coo one" in texts[4]


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


def _modes_of_the_caller() -> None:
    group, num_rows = fs_comm.new_group(timeout_s=20.0), 200_000  # what a rank keeps is copied by torch then
    with torch.inference_mode():
        source, out, wide = torch.ones(num_rows), torch.zeros(num_rows), torch.zeros(num_rows, 2)
        for o in (out, wide[:, 0]):
            work = dist.all_to_all_single(o, source, group=group, async_op=True)
            assert work is not None
            assert work.wait()
            assert (o == 1).all()
    weight = torch.nn.Parameter(torch.zeros(num_rows, 2))
    with torch.no_grad():
        work = dist.all_to_all_single(weight[:, 1], torch.ones(num_rows), group=group, async_op=True)
        assert work is not None
        assert work.wait()
    assert weight.sum() == num_rows


def test_outputs_that_only_the_callers_mode_may_write_to_are_written_to(ranks: Ranks) -> None:
    ranks(2).run(_modes_of_the_caller)


def _hook_that_waits() -> float:
    """As torch's quantization hooks: what is done with one operation's result begins another, and waits for it."""
    group = fs_comm.new_group(timeout_s=20.0)

    def gather_twice(_: None, bucket) -> torch.futures.Future[torch.Tensor]:
        gradient, parts = bucket.buffer(), [torch.empty_like(bucket.buffer()) for _ in range(2)]

        def mean(_: object) -> torch.Tensor:
            dist.all_gather(parts, gradient.clone(), group=group)
            work = dist.all_gather(parts, gradient.clone(), group=group, async_op=True)
            assert work is not None
            work.get_future().wait()
            return gradient.copy_((parts[0] + parts[1]) / 2)

        work = dist.all_gather([torch.empty_like(gradient) for _ in range(2)], gradient, group=group, async_op=True)
        assert work is not None
        return work.get_future().then(mean)  # pyright: ignore[reportReturnType]

    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(20_000, 1, bias=False), process_group=group)
    model.register_comm_hook(None, gather_twice)
    model(torch.full((1, 20_000), float(dist.get_rank()))).sum().backward()
    return model.module.weight.grad.mean().item()


def test_what_follows_an_operation_may_wait_for_another(ranks: Ranks) -> None:
    assert ranks(2).run(_hook_that_waits) == [0.5, 0.5]


def _in_a_forked_child() -> list[str]:
    group = fs_comm.new_group(timeout_s=20.0)
    reader, writer = os.pipe()
    for async_op in (False, True):
        if not (child := os.fork()):
            try:
                work = dist.all_gather([torch.empty(2)] * 2, torch.zeros(2), group=group, async_op=async_op)
                os.write(writer, f"no error, {work}\n".encode())
            except BaseException as error:
                os.write(writer, f"{type(error).__name__}: {error}\n".encode())
            finally:
                os._exit(0)
        os.waitpid(child, 0)
    os.close(writer)
    with open(reader) as found:
        texts = found.read().splitlines()
    dist.all_gather([torch.empty(2)] * 2, torch.zeros(2), group=group)  # the parent's is of use as before
    return texts


def test_a_forked_child_is_told_that_the_group_is_its_parents(ranks: Ranks) -> None:
    for texts in ranks(2).run(_in_a_forked_child):
        assert len(texts) == 2
        assert all(re.match("GroupClosed: .*made before this process was forked", t) for t in texts), texts


def _with_many_files() -> str:
    held = [os.dup(0) for _ in range(1100)]  # a descriptor of 1024 and more is beyond what select() can look at
    os.environ["FS_COMM_HOST"] = "rack 1 | host 2"
    try:
        group = fs_comm.new_group(timeout_s=20.0)
        assert isinstance(group, fs_comm.SmFreeGroup)
        return group.host
    finally:
        del os.environ["FS_COMM_HOST"]
        for fd in held:
            os.close(fd)


def test_a_group_is_made_with_a_thousand_files_open_and_any_name_of_a_host(ranks: Ranks) -> None:
    assert ranks(2).run(_with_many_files) == ["rack 1 | host 2"] * 2


def _bad_switch() -> str:
    os.environ["FS_COMM_ATTACH"] = "off"
    try:
        fs_comm.new_group(timeout_s=20.0)
    except ValueError as error:
        return str(error)
    finally:
        del os.environ["FS_COMM_ATTACH"]
    return "no error"


def test_a_switch_that_is_neither_on_nor_off_is_refused(ranks: Ranks) -> None:
    assert ranks(2).run(_bad_switch) == ["FS_COMM_ATTACH must be 0, to forbid it, or 1, got 'off'"] * 2


def _splits_of_tensors() -> list[float]:
    group, rank = fs_comm.new_group(timeout_s=20.0), dist.get_rank()
    counts = torch.tensor([1, 2])
    out = torch.empty(2 * (rank + 1))
    dist.all_to_all_single(out, torch.full((3,), float(rank)), counts[[rank, rank]], counts, group=group)  # pyright: ignore
    return out.tolist()


def test_splits_may_be_a_tensor(ranks: Ranks) -> None:
    assert ranks(2).run(_splits_of_tensors) == [[0.0, 1.0], [0.0, 0.0, 1.0, 1.0]]


def _interrupt_within(functions: set[str]) -> None:
    """Once the main thread is inside one of them: earlier, the interrupt would hit the test itself."""
    main = threading.main_thread().ident
    while main in sys._current_frames() and functions.isdisjoint(
        frame.f_code.co_name for frame, _ in traceback.walk_stack(sys._current_frames()[main])
    ):
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGINT)


def _interrupted(num_queued: int) -> list[str]:
    group, texts = fs_comm.new_group(timeout_s=20.0), []
    if dist.get_rank() == 0:
        # On the main thread, or on the engine's if that has not left the one before.
        threading.Thread(target=_interrupt_within, args=({"collect", "_wait_for"},), daemon=True).start()
        for _ in range(num_queued):
            dist.all_gather([torch.empty(2)] * 2, torch.zeros(2), group=group, async_op=True)
    else:
        dist.broadcast(torch.zeros(1), 0)
    for _ in range(2):
        try:
            dist.all_gather([torch.empty(2)] * 2, torch.zeros(2), group=group)
        except KeyboardInterrupt:
            dist.broadcast(torch.zeros(1), 0)
        except fs_comm.CommError as error:
            texts.append(str(error))
    return texts


@pytest.mark.parametrize("num_queued", [0, 1])
def test_an_interrupted_operation_is_named_to_those_that_hear_of_it(ranks: Ranks, num_queued: int) -> None:
    here, there = ranks(2).run(_interrupted, num_queued)
    assert here == ["the group failed before and is of no use any more: KeyboardInterrupt"]
    assert there[0] == "rank 0 gave the group up: KeyboardInterrupt"


def _aborted_after_shutdown() -> None:
    for transport in ("shm", "gloo"):
        group = fs_comm.new_group(transports=(transport,), timeout_s=20.0)
        assert isinstance(group, fs_comm.SmFreeGroup)
        group.shutdown()
        group.abort()


def test_a_group_may_be_aborted_after_it_was_shut_down(ranks: Ranks) -> None:
    ranks(2).run(_aborted_after_shutdown)


_ENDS_EARLY = """
import sys, time
import torch, torch.distributed as dist
import fs_comm

store = dist.FileStore(sys.argv[2], 2)
dist.init_process_group("gloo", store=store, rank=int(sys.argv[1]), world_size=2)
group = fs_comm.new_group(timeout_s=20.0)
out = torch.empty(60_000_000)
work = dist.all_to_all_single(out, torch.ones_like(out), group=group, async_op=True)
work.get_future().then(lambda _: None)
time.sleep(0.02)
raise SystemExit(3)
"""


def test_a_process_that_ends_with_an_operation_under_way_keeps_its_exit_code(tmp_path: Path) -> None:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "1"}
    command = (sys.executable, "-c", _ENDS_EARLY)
    ranks = [subprocess.Popen((*command, str(r), tmp_path / "store"), env=environment) for r in range(2)]
    try:
        assert [p.wait(60) for p in ranks] == [3, 3]
    finally:
        for p in ranks:
            p.kill()
