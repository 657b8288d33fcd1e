"""Filesystems of fsspec with an end to every call.

Arrow calls them from its own threads, and a thread that hangs there can neither be ended nor left behind: it aborts the
process when Python ends. So each call runs in a daemon thread with nothing of Arrow's on its stack, which can be left.
"""

import math
import threading
import time
from collections.abc import Callable
from concurrent.futures import CancelledError, Future, InvalidStateError
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

import pyarrow as pa
import pyarrow.fs as pafs

T = TypeVar("T")


class Deadline:
    """When to give up accesses to storage; never, before it is started."""

    def __init__(self) -> None:
        self._at = math.inf
        self._waiting: set[Future[Any]] = set()

    @property
    def left_s(self) -> float:
        return max(0.0, self._at - time.monotonic())

    def start(self, seconds: float) -> None:
        if self._at > -math.inf:
            self._at = time.monotonic() + seconds

    def give_up(self) -> None:
        """Passes at once and for good; whoever waits in `run` gets its error."""
        self._at = -math.inf
        for future in list(self._waiting):
            future.cancel()

    def run(self, call: Callable[[], T]) -> T:
        """
        Raises:
            TimeoutError: The deadline passed first; `call` is left to itself.
        """
        future: Future[T] = Future()
        self._waiting.add(future)
        try:
            if not self.left_s:
                raise CancelledError
            threading.Thread(target=_complete, args=(future, call), name="parquet-access", daemon=True).start()
            return future.result(min(self.left_s, threading.TIMEOUT_MAX))
        except (TimeoutError, CancelledError) as error:
            if future.done() and not future.cancelled():
                raise
            raise TimeoutError("the storage did not answer in time") from error
        finally:
            self._waiting.discard(future)


def bounded(filesystem: Any, deadline: Deadline) -> Any:
    """`filesystem`, whose calls end at the deadline if they are fsspec's; Arrow's own ones have limits of their own."""
    if isinstance(filesystem, pafs.PyFileSystem) and type(filesystem.handler) is pafs.FSSpecHandler:
        return pafs.PyFileSystem(_Handler(filesystem.handler.fs, deadline))
    return filesystem


def _complete(future: Future[T], call: Callable[[], T]) -> None:
    try:
        end = partial(future.set_result, call())
    except BaseException as error:
        end = partial(future.set_exception, error)
    with suppress(InvalidStateError):  # given up
        end()


class _Handler(pafs.FSSpecHandler):
    def __init__(self, fs: Any, deadline: Deadline) -> None:
        super().__init__(fs)
        self._deadline = deadline

    def get_file_info(self, paths: list[str]) -> list[Any]:
        return [self._deadline.run(partial(self._info, path)) for path in paths]

    def get_file_info_selector(self, selector: Any) -> Any:
        listing: Any = super().get_file_info_selector
        return self._deadline.run(lambda: listing(selector))

    def open_input_file(self, path: str) -> Any:
        opened = self._deadline.run(lambda: _found(lambda: self.fs.open(path, mode="rb")))
        return pa.PythonFile(_File(opened, self._deadline), mode="r")

    def _info(self, path: str) -> Any:
        try:
            return self._create_file_info(path, _found(lambda: self.fs.info(path)))
        except FileNotFoundError:
            return pafs.FileInfo(path, pafs.FileType.NotFound)


def _found(access: Callable[[], T]) -> T:
    """fsspec's HTTP takes each failure of a server for a missing file; here only a missing file is one."""
    try:
        return access()
    except FileNotFoundError as error:
        cause = error.__cause__
        is_of_http = type(cause).__module__.partition(".")[0] == "aiohttp" or isinstance(cause, TimeoutError)
        if cause is not None and is_of_http and getattr(cause, "status", None) not in (404, 410):
            raise cause from None
        raise


class _File:
    """What Arrow calls of a Python file that is read."""

    def __init__(self, opened: Any, deadline: Deadline) -> None:
        self._opened: Any = opened
        self._deadline, self.closed = deadline, False

    def close(self) -> None:
        self._opened, self.closed = None, True  # which closes it once no call is left inside

    def read(self, num_bytes: int = -1) -> bytes:
        return self._deadline.run(partial(self._opened.read, num_bytes))

    def seek(self, offset: int, whence: int = 0) -> int:
        return self._opened.seek(offset, whence)

    def tell(self) -> int:
        return self._opened.tell()
