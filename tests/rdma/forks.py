"""Ranks as forks of the test process: where importing torch takes a minute, it is imported once.

The test process itself must never open a device or start a thread.
"""

import faulthandler
import multiprocessing
import os
import shutil
import signal
import tempfile
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from time import monotonic
from typing import Any

import torch
import torch.distributed as dist

from tests.ranks import Outcome, RankFailure

_FORK = multiprocessing.get_context("fork")


def run(task: Callable[..., Any], world_size: int, *args: Any, timeout_s: float = 120.0) -> list[Any]:
    """Each rank's `task(rank, store, *args)`, in rank order; raises `RankFailure` unless all of them return."""
    outcomes = run_outcomes(task, world_size, *args, timeout_s=timeout_s)
    bad = [o for o in outcomes if not o.ok]
    if bad:
        raise RankFailure("\n".join(f"rank {o.rank}: {o.error or f'ended with exit code {o.exitcode}'}" for o in bad))
    return [o.value for o in outcomes]


def run_outcomes(task: Callable[..., Any], world_size: int, *args: Any, timeout_s: float = 120.0) -> list[Outcome]:
    """As `run`, but errors and deaths are outcomes; a rank that is not done in time fails the test with its stack."""
    folder = tempfile.mkdtemp(prefix="rdma-ranks-")
    pipes: list[Connection] = []
    processes: list[Any] = []
    for rank in range(world_size):
        mine, theirs = _FORK.Pipe()
        process = _FORK.Process(target=_serve, args=(rank, world_size, folder, theirs, task, args))
        process.start()
        theirs.close()
        pipes.append(mine)
        processes.append(process)
    found: dict[int, Outcome] = {}
    deadline = monotonic() + timeout_s
    try:
        while len(found) < world_size:
            waiting = {pipes[r]: r for r in range(world_size) if r not in found}
            ready = wait(list(waiting), timeout=max(0.0, deadline - monotonic()))
            if not ready:
                stacks = _stacks(folder, {r: processes[r].pid for r in waiting.values()})
                raise RankFailure(f"no answer within {timeout_s} s from ranks {sorted(waiting.values())}\n{stacks}")
            for pipe in ready:
                rank = waiting[pipe]
                try:
                    value, error = pipe.recv()
                    found[rank] = Outcome(rank, value=value, error=error)
                except EOFError:
                    processes[rank].join(10)
                    found[rank] = Outcome(rank, exitcode=processes[rank].exitcode)
        return [found[r] for r in range(world_size)]
    finally:
        for process in processes:
            if rank_is_done(process, patience_s=10.0 if len(found) == world_size else 0.0):
                continue
            process.kill()
            process.join(10)
        for pipe in pipes:
            pipe.close()
        shutil.rmtree(folder, ignore_errors=True)


def rank_is_done(process: Any, patience_s: float) -> bool:
    process.join(patience_s)
    return not process.is_alive()


def _serve(
    rank: int, world_size: int, folder: str, pipe: Connection, task: Callable[..., Any], args: tuple[Any, ...]
) -> None:
    stack = open(Path(folder, f"stack{rank}"), "w")
    faulthandler.register(signal.SIGUSR1, file=stack, all_threads=True)
    torch.set_num_threads(1)
    try:
        store = dist.FileStore(str(Path(folder, "store")), world_size)
        value, error = task(rank, store, *args), None
    except BaseException:
        value, error = None, traceback.format_exc()
    pipe.send((value, error))
    pipe.close()
    os._exit(0)  # the parent's fixtures and exit handlers are not this process's to run


def _stacks(folder: str, pids: dict[int, int]) -> str:
    for pid in pids.values():
        os.kill(pid, signal.SIGUSR1)
    signal.sigtimedwait([], 2.0)
    return "\n".join(f"--- rank {r} ---\n{Path(folder, f'stack{r}').read_text()}" for r in pids)
