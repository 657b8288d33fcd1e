"""An operation on device memory under way, and what carries its copies."""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor

from fs_comm.chunks import Step
from fs_comm.staging import View


class Event(Protocol):
    def query(self) -> bool: ...


class Copies(Protocol):
    """What the engine asks of `CudaCopies`."""

    @property
    def stream_waits(self) -> bool: ...
    @property
    def num_streams(self) -> int: ...
    @property
    def last(self) -> Any: ...
    def use_in_thread(self) -> None: ...
    def mark_caller(self) -> Any: ...
    def begin(self, after: Any) -> None: ...
    def put(self, stream: int, address: int, device: int, num_bytes: int) -> None: ...
    def take(self, stream: int, device: int, address: int, num_bytes: int) -> None: ...
    def mark(self, stream: int) -> Event: ...
    def join(self) -> None: ...
    def end(self) -> Event: ...
    def keep(self, tensor: Tensor, *, puts: bool) -> None: ...
    def wait_until_at_least(self, stream: int, word: int, count: int) -> None: ...
    def wait_until_equal(self, stream: int, word: int, value: int) -> None: ...
    def write(self, stream: int, word: int, value: int) -> None: ...
    def close(self) -> None: ...


@dataclass(slots=True, eq=False)
class Job:
    """One rank's part of an operation under way."""

    sequence: int
    views: list[View]
    """What this rank told each."""
    steps: list[Step]
    sends: Sequence[Tensor] = ()
    receives: Sequence[Tensor] = ()
    finish: Callable[[], None] | None = None
    after: Any = None
    event: Event | None = None
    """All copies; None before the last was given to the streams."""
    given: threading.Event = field(default_factory=threading.Event)
    """Set after `event`, or `error`."""
    error: BaseException | None = None
    since: float = 0.0

    def __str__(self) -> str:
        return str(self.views[0])
