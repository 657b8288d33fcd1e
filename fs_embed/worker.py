"""A thread that carries out exchanges in the order they were asked for, beside the model's compute."""

import atexit
import contextlib
import queue
import threading
import weakref
from collections.abc import Callable
from typing import Generic, TypeVar

import torch

from fs_embed.errors import ExchangeTimeout

T = TypeVar("T")


class Latch:
    """Something that will have happened: `set` or `fail` by one thread, `wait` by others."""

    def __init__(self, what: str) -> None:
        self.what = what
        self._done = threading.Event()
        self._error: BaseException | None = None
        self._device_done: torch.cuda.Event | None = None

    def set(self, stream: torch.cuda.Stream | None) -> None:
        """The host part is done; the device part is what `stream` holds now."""
        if stream is not None:
            self._device_done = torch.cuda.Event()
            self._device_done.record(stream)
        self._done.set()

    def fail(self, error: BaseException) -> None:
        if not self._done.is_set():
            self._error = error
            self._done.set()

    def wait(self, timeout_s: float) -> None:
        """Blocks the thread until the host part is done, and orders the current CUDA stream after the device part."""
        if not self._done.wait(timeout_s):
            raise ExchangeTimeout(f"waited {timeout_s:.0f} s for {self.what}: a rank is lost, stopped or did not call")
        if self._error is not None:
            raise self._error
        if self._device_done is not None:
            torch.cuda.current_stream().wait_event(self._device_done)


class Job(Latch, Generic[T]):
    """A task for the worker; `result` waits for it."""

    def __init__(self, task: Callable[[], T], what: str) -> None:
        super().__init__(what)
        self._task: Callable[[], T] | None = task
        self._result: list[T] = []

    def run(self, stream: torch.cuda.Stream | None) -> None:
        assert self._task is not None
        self._result.append(self._task())
        self._task = None  # what it holds must not live as long as the job
        self.set(stream)

    def result(self, timeout_s: float) -> T:
        self.wait(timeout_s)
        return self._result[0]


class Worker:
    """Runs jobs one after the other on a thread of its own, for CUDA on a stream of its own.

    After a failure nothing runs any more, since messages would no longer pair with those of the peers: all jobs and
    the latches of `watch` fail with the first error.
    """

    def __init__(self, name: str, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._jobs: queue.SimpleQueue[tuple[Job[object], torch.cuda.Event | None] | None] = queue.SimpleQueue()
        self._watched: weakref.WeakSet[Latch] = weakref.WeakSet()
        self._failed: list[BaseException] = []
        arguments = (self._jobs, self.stream, self._watched, self._failed)
        self._thread = threading.Thread(target=_serve, args=arguments, name=name, daemon=True)
        self._thread.start()
        self._end = weakref.finalize(self, self._jobs.put, None)
        self._end.atexit = False
        _live.add(self)

    def close(self, timeout_s: float = 5.0) -> bool:
        """Ends the thread after the jobs that it has, and says whether it has ended; may be called twice."""
        self._end()
        if self._thread is not threading.current_thread():
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def watch(self, latch: Latch) -> None:
        """Has `latch` fail when a job does."""
        self._watched.add(latch)
        if self._failed:
            latch.fail(self._failed[0])

    def submit(self, task: Callable[[], T], what: str) -> Job[T]:
        """Queues `task`; on CUDA it starts after what the caller's stream holds now."""
        job = Job(task, what)
        ready: torch.cuda.Event | None = None
        if self.stream is not None:
            ready = torch.cuda.Event()
            ready.record(torch.cuda.current_stream())
        self._jobs.put((job, ready))  # pyright: ignore[reportArgumentType]  a Job[T] is run, never asked for its T here
        return job


def _serve(
    jobs: "queue.SimpleQueue[tuple[Job[object], torch.cuda.Event | None] | None]",
    stream: torch.cuda.Stream | None,
    watched: "weakref.WeakSet[Latch]",
    failed: list[BaseException],
) -> None:
    while (entry := jobs.get()) is not None:
        job, ready = entry
        try:
            if failed:
                raise failed[0]
            if stream is not None and ready is not None:
                stream.wait_event(ready)
            with torch.cuda.stream(stream) if stream is not None else contextlib.nullcontext():
                job.run(stream)
        except BaseException as error:
            failed.append(error)
            job.fail(error)
            for latch in list(watched):
                latch.fail(error)
        del job, entry, ready  # what a finished job holds must not live until the next one comes


_live: "weakref.WeakSet[Worker]" = weakref.WeakSet()


def _at_exit() -> None:
    """A thread that comes back from C++ code to an interpreter that has ended aborts the process."""
    for worker in list(_live):
        worker.close()


atexit.register(_at_exit)
