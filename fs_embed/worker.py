"""A thread that carries out exchanges in the order they were asked for, beside the model's compute."""

import contextlib
import queue
import threading
import weakref
from collections.abc import Callable
from typing import Generic, TypeVar

import torch

from fs_embed.errors import ExchangeTimeout

T = TypeVar("T")


class Job(Generic[T]):
    """Something that the worker will have done; `wait` gives its result, or raises what it raised."""

    def __init__(self, task: Callable[[], T], what: str) -> None:
        self.task, self.what = task, what
        self._done = threading.Event()
        self._result: list[T] = []
        self._error: BaseException | None = None
        self._device_done: torch.cuda.Event | None = None

    @property
    def done(self) -> bool:
        return self._done.is_set()

    def run(self, stream: torch.cuda.Stream | None, failed: BaseException | None) -> BaseException | None:
        """On the worker. After a failure nothing runs any more: its messages would not pair with those of the peers."""
        try:
            if failed is not None:
                raise failed
            self._result.append(self.task())
        except BaseException as error:
            self._error = error
        if stream is not None:
            self._device_done = torch.cuda.Event()
            self._device_done.record(stream)
        self._done.set()
        return self._error

    def wait(self, timeout_s: float) -> T:
        """Blocks the thread until the host part is done, and orders the current CUDA stream after the device part."""
        if not self._done.wait(timeout_s):
            raise ExchangeTimeout(f"waited {timeout_s:.0f} s for {self.what}: a rank is lost, stopped or did not call")
        if self._error is not None:
            raise self._error
        if self._device_done is not None:
            torch.cuda.current_stream().wait_event(self._device_done)
        return self._result[0]


class Worker:
    """Runs jobs one after the other on a thread of its own, for CUDA on a stream of its own."""

    def __init__(self, name: str, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._jobs: queue.SimpleQueue[tuple[Job[object], torch.cuda.Event | None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=_serve, args=(self._jobs, self._stream), name=name, daemon=True)
        self._thread.start()
        self.close = weakref.finalize(self, self._jobs.put, None)
        """Ends the thread after the jobs that it has; may be called twice."""

    def submit(self, task: Callable[[], T], what: str) -> Job[T]:
        """Queues `task`; on CUDA it starts after what the caller's stream holds now."""
        job = Job(task, what)
        ready: torch.cuda.Event | None = None
        if self._stream is not None:
            ready = torch.cuda.Event()
            ready.record(torch.cuda.current_stream())
        self._jobs.put((job, ready))  # pyright: ignore[reportArgumentType]  a Job[T] is run, never asked for its T here
        return job


def _serve(
    jobs: "queue.SimpleQueue[tuple[Job[object], torch.cuda.Event | None] | None]", stream: torch.cuda.Stream | None
) -> None:
    failed: BaseException | None = None
    while (entry := jobs.get()) is not None:
        job, ready = entry
        if stream is not None and ready is not None:
            stream.wait_event(ready)
        with torch.cuda.stream(stream) if stream is not None else contextlib.nullcontext():
            failed = job.run(stream, failed)
        del job, entry, ready  # what a finished job holds must not live until the next one comes
