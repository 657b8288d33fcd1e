"""Modules come and go: nothing of them stays, and a rank that is lost is an error, not a hang."""

import gc
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import fs_embed
from tests.fs_embed.training import batches, loss_of, make_model
from tests.ranks import RankPool


def _rounds(close: bool) -> tuple[list[int], list[int]]:
    threads, descriptors = list[int](), list[int]()
    for _ in range(6):
        model = fs_embed.prioritize(make_model(), optimizer=fs_embed.SGD(lr=0.1), timeout_s=20.0)
        todo = batches(dist.get_rank(), 2)
        model.table.prefetch(todo[0])
        model.table.prefetch(None)
        loss_of([model.table(ids) for ids in todo[0]], 0).backward()
        model.table.flush()
        if close:
            model.table.close()
        del model
        gc.collect()
        dist.barrier()
        time.sleep(0.2)  # threads of the transport end a little later
        threads.append(len(os.listdir("/proc/self/task")))
        descriptors.append(len(os.listdir("/proc/self/fd")))
    return threads, descriptors


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="counts threads and descriptors in /proc")
@pytest.mark.parametrize("close", [True, False])
def test_making_modules_again_and_again_keeps_nothing(ranks: Callable[[int], RankPool], close: bool) -> None:
    for threads, descriptors in ranks(2).run(_rounds, close):
        assert threads[-1] <= threads[1]
        assert descriptors[-1] <= descriptors[1]


def _lose_a_rank() -> str:
    model = fs_embed.prioritize(make_model(), optimizer=fs_embed.SGD(lr=0.1), timeout_s=10.0)
    todo = batches(dist.get_rank(), 4)
    model.table.prefetch(todo[0])
    started = time.monotonic()
    try:
        for step in range(3):
            model.table.prefetch(todo[step + 1])
            loss = loss_of([model.table(ids) for ids in todo[step]], step)
            if step == 1 and dist.get_rank() == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            loss.backward()
        model.table.flush()
    except Exception as error:
        took = time.monotonic() - started
        return f"{type(error).__name__} after {took:.0f} s: {error}" if took < 30 else "too late"
    return "no error"


def test_a_rank_that_is_killed_is_an_error_on_the_others(ranks: Callable[[int], RankPool]) -> None:
    outcomes = ranks(2).outcomes(_lose_a_rank, timeout_s=60)
    assert outcomes[1].exitcode == -signal.SIGKILL
    assert outcomes[0].ok
    assert "Error" in outcomes[0].value or "Lost" in outcomes[0].value or "Timeout" in outcomes[0].value


def _other_settings() -> str:
    rate = 0.1 if dist.get_rank() == 0 else 0.2
    try:
        fs_embed.prioritize(make_model(), optimizer=fs_embed.SGD(lr=rate))
    except ValueError as error:
        return str(error)
    return "no error"


def test_ranks_with_other_settings_are_told(ranks: Callable[[int], RankPool]) -> None:
    for text in ranks(2).run(_other_settings):
        assert "optimizer must be the same on every rank" in text


def _two_epochs() -> float:
    model = fs_embed.prioritize(make_model(), optimizer=fs_embed.SGD(lr=0.1), timeout_s=20.0)
    todo = batches(dist.get_rank() if dist.is_initialized() else 0, 5)
    for _ in range(2):
        for batch in fs_embed.lookahead(todo, model, {"table": lambda b: b}):
            loss_of([model.table(ids) for ids in batch], 0).backward()
    stats = model.table.stats()
    model.table.close()
    return stats["hits"] - 10 + stats["misses"]


def test_a_second_epoch_is_prefetched_too(ranks: Callable[[int], RankPool]) -> None:
    assert ranks(2).run(_two_epochs) == [0, 0]
    assert _two_epochs() == 0


def test_a_batch_that_is_changed_after_its_announcement_is_a_miss() -> None:
    model = fs_embed.prioritize(make_model(), optimizer=fs_embed.SGD(lr=0.1))
    ids = torch.tensor([1, 2, 3])
    model.table.prefetch([ids])
    ids[0] = 5
    with pytest.warns(UserWarning, match="without having been prefetched"):
        rows = model.table(ids)
    assert torch.equal(rows, make_model().table.weight[ids])
    rows.sum().backward()
    model.table.close()
    assert threading.active_count() < 50


def test_a_gradient_may_be_overwritten_after_the_backward() -> None:
    """A deferred update must not read what the caller of backward has written since."""
    model = fs_embed.prioritize(make_model(), optimizer=fs_embed.SGD(lr=1.0))
    ids, worker = torch.tensor([1, 2, 3]), model.table.tables.engines[0].worker
    model.table.prefetch([ids])
    model.table.prefetch(None)
    rows = model.table(ids)
    may_go_on = threading.Event()
    worker.submit(lambda: may_go_on.wait(10), "a test")
    gradient = torch.ones_like(rows)
    rows.backward(gradient)
    gradient.zero_()
    may_go_on.set()
    after = model.state_dict()["table.weight"][ids]
    assert torch.equal(after, make_model().table.weight.detach()[ids] - 1)
    model.table.close()


_ENDS_EARLY = """
import atexit, threading, time
atexit.register(lambda: print([t.name for t in threading.enumerate()]))  # after what is registered from now on
import torch
from fs_embed.worker import Worker

worker = Worker("fs_embed", torch.device("cpu"))
worker.submit(lambda: time.sleep(0.5), "a job that takes its time")
raise SystemExit(3)
"""


def test_no_thread_outlives_the_interpreter() -> None:
    """One that comes back from C++ to an interpreter that has ended aborts the process."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-c", _ENDS_EARLY]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (3, "['MainThread']\n"), done.stderr
