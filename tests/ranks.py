"""Real processes for tests: pools of ranks with a gloo group, a time limit on every task, stacks when it passes.

A pool's processes live across tests, since importing torch costs more than most tests. A task is a module-level
function that runs on every rank. A pool whose task failed, or lost a rank, is thrown away: the next task gets fresh
processes.
"""

import contextlib
import faulthandler
import multiprocessing
import os
import pickle
import shutil
import signal
import socket
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["numpy", "torch", "torch.distributed", "pyarrow"])


@dataclass(frozen=True)
class Outcome:
    """What became of one rank's task: a value, an error's text, or an exit code (negative: the signal)."""

    rank: int
    value: Any = None
    error: str | None = None
    exitcode: int | None = None

    @property
    def ok(self) -> bool:
        return self.error is None and self.exitcode is None


class RankFailure(AssertionError):
    """At least one rank raised, died or did not answer; the text holds all ranks' tracebacks or stacks."""


class RankPool:
    """`world_size` processes, each a rank of one gloo group; `run` gives each the same task."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self._folder: str | None = None
        self._processes: list[Any] = []
        self._pipes: list[Connection] = []

    def run(self, task: Callable[..., Any], *args: Any, timeout_s: float = 60.0) -> list[Any]:
        """Each rank's `task(*args)`, in rank order; raises `RankFailure` unless all of them return in time."""
        outcomes = self.outcomes(task, *args, timeout_s=timeout_s)
        bad = [o for o in outcomes if not o.ok]
        if bad:
            lines = [f"rank {o.rank}: {o.error or f'ended with exit code {o.exitcode}'}" for o in bad]
            raise RankFailure("\n".join(lines))
        return [o.value for o in outcomes]

    def outcomes(self, task: Callable[..., Any], *args: Any, timeout_s: float = 60.0) -> list[Outcome]:
        """As `run`, but errors and deaths are outcomes; only a rank that does not answer in time raises."""
        self._start()
        message = pickle.dumps((task, args))
        for pipe in self._pipes:
            pipe.send_bytes(message)
        found: dict[int, Outcome] = {}
        deadline = time.monotonic() + timeout_s
        while len(found) < self.world_size:
            open_ranks = [r for r in range(self.world_size) if r not in found]
            ready = wait([self._pipes[r] for r in open_ranks], timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                stacks = self._stacks(open_ranks)
                self.close()
                raise RankFailure(f"no answer within {timeout_s} s from ranks {open_ranks}\n{stacks}")
            for rank in open_ranks:
                if self._pipes[rank] in ready:
                    found[rank] = self._receive(rank)
        outcomes = [found[r] for r in range(self.world_size)]
        if not all(o.ok for o in outcomes):
            self.close()
        return outcomes

    def pids(self) -> list[int]:
        """Process ids by rank, for tests that kill or stop one."""
        self._start()
        return [p.pid for p in self._processes]

    def close(self) -> None:
        for process in self._processes:
            if process.is_alive():
                process.kill()
        for process in self._processes:
            process.join(10)
        for pipe in self._pipes:
            pipe.close()
        self._processes, self._pipes = [], []
        if self._folder:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None

    def _start(self) -> None:
        if self._processes:
            return
        self._folder = tempfile.mkdtemp(prefix="ranks-")
        port = _free_port()
        for rank in range(self.world_size):
            mine, theirs = _CONTEXT.Pipe()
            process = _CONTEXT.Process(
                target=_serve, args=(rank, self.world_size, port, self._folder, theirs), daemon=False
            )
            process.start()
            theirs.close()
            self._processes.append(process)
            self._pipes.append(mine)

    def _receive(self, rank: int) -> Outcome:
        try:
            value, error = self._pipes[rank].recv()
        except (EOFError, ConnectionResetError):
            self._processes[rank].join(10)
            return Outcome(rank, exitcode=self._processes[rank].exitcode)
        return Outcome(rank, value=value, error=error)

    def _stacks(self, ranks: list[int]) -> str:
        for rank in ranks:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._processes[rank].pid, signal.SIGUSR1)
        time.sleep(1.0)
        assert self._folder is not None
        texts = [f"--- rank {r} ---\n{Path(self._folder, f'stack{r}').read_text()}" for r in ranks]
        return "\n".join(texts)


def _free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def _serve(rank: int, world_size: int, port: int, folder: str, pipe: Connection) -> None:
    import torch
    import torch.distributed as dist

    stack = open(Path(folder, f"stack{rank}"), "w")
    faulthandler.register(signal.SIGUSR1, file=stack, all_threads=True)
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(world_size),
        LOCAL_RANK=str(rank),
        LOCAL_WORLD_SIZE=str(world_size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, world_size, is_master=rank == 0, timeout=timedelta(seconds=60))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=60))
    while True:
        try:
            message = pipe.recv_bytes()
        except (EOFError, ConnectionResetError):
            return
        try:
            task, args = pickle.loads(message)
            value, error = task(*args), None
        except BaseException:
            value, error = None, traceback.format_exc()
        pipe.send((value, error))
