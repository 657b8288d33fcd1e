"""The handle of an asynchronous operation, as torch.distributed gives it."""

import copy
import threading
from datetime import timedelta

import torch
import torch.distributed as dist

from fs_comm.errors import CommTimeout
from fs_comm.exchange import Exchange

CALLBACKS = "fs_comm_future"
"""Name of the threads that settle futures."""


class ExchangeWork(dist.Work):
    """`wait` raises what went wrong; nothing is lost in a future that hides it."""

    def __init__(self, exchange: Exchange, result: list[torch.Tensor], timeout_s: float) -> None:
        super().__init__()
        self._exchange, self._result, self._timeout_s = exchange, result, timeout_s
        self._future: torch.futures.Future[list[torch.Tensor]] | None = None
        self._asking = threading.Lock()

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Blocks until the operation is done; a timeout of zero or less means the group's."""
        # The engine's own limit comes first and says more: it knows which peer is missing. Operations before this one
        # may each take as long.
        limit = timeout.total_seconds() if timeout.total_seconds() > 0 else None
        while not self._exchange.done.wait(limit if limit is not None else self._timeout_s):
            if limit is not None:
                raise CommTimeout(f"{self._exchange}: not done after {limit:.0f} s")
        if self._exchange.error is not None:
            raise self._exchange.error
        return True

    def is_completed(self) -> bool:
        return self._exchange.done.is_set()

    def is_success(self) -> bool:
        return self.is_completed() and self._exchange.error is None

    def exception(self) -> BaseException | None:  # pyright: ignore[reportIncompatibleMethodOverride]
        return self._exchange.error

    def result(self) -> list[torch.Tensor]:
        return self._result

    def get_future(self) -> "torch.futures.Future[list[torch.Tensor]]":  # pyright: ignore
        """Its callbacks may wait for other operations, so they run on a thread of their own, never on the engine's."""
        with self._asking:
            if self._future is None:
                self._future = torch.futures.Future()
                if self.is_completed():
                    self._settle(self._future)
                else:
                    threading.Thread(target=self._settle, args=(self._future,), name=CALLBACKS, daemon=True).start()
        return self._future

    def _settle(self, future: "torch.futures.Future[list[torch.Tensor]]") -> None:
        self._exchange.done.wait()
        if self._exchange.error is None:
            future.set_result(self._result)
        else:
            # A copy: the error that `wait` raises refers to the caller's frames, and so to this work; a ring that leads
            # through the future is out of the garbage collector's sight, and would keep the group for ever.
            future.set_exception(copy.copy(self._exchange.error))  # pyright: ignore[reportArgumentType]
