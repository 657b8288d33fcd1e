"""The handle of an operation on device memory, as torch.distributed gives it."""

import threading
import time
from copy import copy
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from fs_comm.cuda_engine import CudaEngine
from fs_comm.cuda_job import Job
from fs_comm.cuda_pinned import PinnedEngine
from fs_comm.errors import CommTimeout
from fs_comm.work import CALLBACKS


class CudaWork(dist.Work):
    """`wait` orders the current stream after the operation, as for any other CUDA backend."""

    def __init__(self, engine: CudaEngine | PinnedEngine, job: Job, result: Any) -> None:
        super().__init__()
        self._engine, self._job, self._result = engine, job, result
        self._future: torch.futures.Future[Any] | None = None
        self._asking = threading.Lock()

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """The current stream waits; with a timeout the caller too, until all is done.

        Raises:
            CommError: What is known to have gone wrong. What goes wrong later is raised by the next operation.
        """
        seconds = timeout.total_seconds()
        deadline = time.monotonic() + seconds if seconds > 0 else None
        while not self._job.given.wait(self._engine.timeout_s if deadline is None else seconds):
            if deadline is not None:
                raise CommTimeout(f"{self._job}: not done after {seconds:.0f} s")
        while deadline is not None and not self.is_completed():
            if time.monotonic() > deadline:
                raise CommTimeout(f"{self._job}: not done after {seconds:.0f} s")
            time.sleep(0.0002)
        if self._job.error is not None:
            raise self._job.error
        torch.cuda.current_stream(self._engine.device).wait_event(self._job.event)  # pyright: ignore[reportArgumentType]
        return True

    def is_completed(self) -> bool:
        job = self._job
        return job.given.is_set() and (job.error is not None or (job.event is not None and job.event.query()))

    def is_success(self) -> bool:
        return self.is_completed() and self._job.error is None

    def exception(self) -> BaseException | None:  # pyright: ignore[reportIncompatibleMethodOverride]
        return self._job.error

    def result(self) -> Any:
        return self._result

    def get_future(self) -> "torch.futures.Future[Any]":  # pyright: ignore
        """Done once the copies are given to the streams; whoever waits for it, waits with the current stream.

        As with CPU tensors, callbacks run on a thread of their own.
        """
        with self._asking:
            if self._future is None:
                self._future = torch.futures.Future(devices=[self._engine.device])
                if self._job.given.is_set():
                    self._settle(self._future)
                else:
                    threading.Thread(target=self._settle, args=(self._future,), name=CALLBACKS, daemon=True).start()
        return self._future

    def _settle(self, future: "torch.futures.Future[Any]") -> None:
        self._job.given.wait()
        if self._job.error is not None:
            # A copy: the error's traceback refers to this work, and gc cannot see into the future.
            future.set_exception(copy(self._job.error))  # pyright: ignore[reportArgumentType]
            return
        with torch.cuda.stream(self._engine.copies.last):
            future.set_result(self._result)
