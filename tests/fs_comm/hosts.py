"""Several hosts on one machine: network namespaces joined by a cable, with ranks that live in them. Needs root."""

import contextlib
import ctypes
import faulthandler
import multiprocessing
import os
import random
import shutil
import signal
import subprocess
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.ranks import Outcome, RankFailure

_CONTEXT = multiprocessing.get_context("forkserver")
_CLONE_NEWNET = 0x40000000


def why_not() -> str | None:
    """Why this machine cannot have hosts; None where it can."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        return "network namespaces need root, and the command `ip` (iproute2)"
    name = f"fst{random.randrange(16**6):06x}"
    if subprocess.run(("ip", "netns", "add", name), capture_output=True, check=False).returncode:
        return "`ip netns add` is refused here (containers need CAP_SYS_ADMIN)"
    ip("netns", "del", name)
    return None


class TwoHosts:
    """Two namespaces, joined by a cable of `rate`; what was made is taken down again."""

    def __init__(self, rate: str | None = None) -> None:
        tag = f"{random.randrange(16**4):04x}"
        self._rate, self._names = rate, [f"fst{tag}h{h}" for h in range(2)]
        self._processes: list[Any] = []

    def __enter__(self) -> "TwoHosts":
        first, second = self._names
        for name in self._names:
            ip("netns", "add", name)
        ip("-n", first, "link", "add", "eth0", "type", "veth", "peer", "name", "eth0", "netns", second)
        for host, name in enumerate(self._names):
            ip("-n", name, "addr", "add", f"10.78.0.{host + 1}/24", "dev", "eth0")
            ip("-n", name, "link", "set", "lo", "up")
            ip("-n", name, "link", "set", "eth0", "up")
            if self._rate is not None:
                shaping = ("root", "tbf", "rate", self._rate, "burst", "64k", "latency", "100ms")
                subprocess.run(("tc", "-n", name, "qdisc", "add", "dev", "eth0", *shaping), check=True)
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            process.kill()
            process.join(10)
        for name in self._names:
            subprocess.run(("ip", "netns", "del", name), check=False)

    def unplug(self) -> None:
        ip("-n", self._names[0], "link", "set", "eth0", "down")

    def outcomes(
        self,
        task: Callable[..., Any],
        *args: Any,
        ranks_per_host: int = 2,
        timeout_s: float = 60.0,
        meanwhile: Any = None,
    ) -> list[Outcome]:
        """Each rank's `task(*args)`, host by host; `meanwhile` is called once every rank has called `begun`."""
        size = 2 * ranks_per_host
        with tempfile.TemporaryDirectory(prefix="hosts-") as folder:
            pipes: list[Connection] = []
            for rank in range(size):
                mine, theirs = _CONTEXT.Pipe()
                arguments = (self._names[rank // ranks_per_host], rank, size, folder, theirs, task, args)
                process = _CONTEXT.Process(target=_serve, args=arguments)
                process.start()
                theirs.close()
                self._processes.append(process)
                pipes.append(mine)
            found: dict[int, Outcome] = {}
            deadline = time.monotonic() + timeout_s
            while len(found) < size:
                if meanwhile is not None and len(list(Path(folder).glob("begun*"))) == size:
                    meanwhile()
                    meanwhile = None
                waiting = {pipes[r]: r for r in range(size) if r not in found}
                for pipe in wait(list(waiting), timeout=0.05):
                    rank = waiting[pipe]  # pyright: ignore[reportArgumentType]
                    try:
                        value, error = pipes[rank].recv()
                        found[rank] = Outcome(rank, value=value, error=error)
                    except EOFError:
                        self._processes[rank].join(10)
                        found[rank] = Outcome(rank, exitcode=self._processes[rank].exitcode)
                if time.monotonic() > deadline:
                    raise RankFailure(f"no answer within {timeout_s} s:\n{self._stacks(folder, waiting.values())}")
            for pipe in pipes:
                pipe.close()
            return [found[r] for r in range(size)]

    def _stacks(self, folder: str, ranks: Any) -> str:
        for rank in ranks:
            os.kill(self._processes[rank].pid, signal.SIGUSR1)
        time.sleep(1)
        return "\n".join(f"--- rank {r} ---\n{Path(folder, f'stack{r}').read_text()}" for r in ranks)


def begun() -> None:
    """Called by a task: the test may now do what it does meanwhile."""
    Path(os.environ["HOSTS_FOLDER"], f"begun{dist.get_rank()}").touch()


def ip(*arguments: str) -> None:
    subprocess.run(("ip", *arguments), check=True)


def _serve(
    namespace: str, rank: int, size: int, folder: str, pipe: Connection, task: Callable[..., Any], args: Any
) -> None:
    stack = open(Path(folder, f"stack{rank}"), "w")
    faulthandler.register(signal.SIGUSR1, file=stack, all_threads=True)
    try:
        with open(f"/run/netns/{namespace}") as f:
            if ctypes.CDLL(None, use_errno=True).setns(f.fileno(), _CLONE_NEWNET):
                raise OSError(ctypes.get_errno(), "setns")
        os.environ.update(GLOO_SOCKET_IFNAME="eth0", HOSTS_FOLDER=folder)
        torch.set_num_threads(1)
        store = dist.FileStore(f"{folder}/store", size)  # pyright: ignore[reportPrivateImportUsage]
        limit = timedelta(seconds=60)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=limit)
        value, error = task(*args), None
    except BaseException:
        value, error = None, traceback.format_exc()
    with contextlib.suppress(OSError):
        pipe.send((value, error))
    os._exit(0)  # gloo's goodbyes would wait for a cable that may be gone
