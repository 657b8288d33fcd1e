"""Draws batches from the wrapped loader in a thread of its own, one ahead, each with the state that follows it."""

import copy
import queue
import threading
import time
from collections.abc import Iterable, Iterator
from typing import Any

from fs_data.device import drawn_event
from fs_data.exchange import Raw


class Reader:
    """One pass over a loader. After its end, or an error, `take` goes on giving the same answer."""

    def __init__(
        self, loader: Iterable[Any], *, exhausted: bool, skip: int, timeout_s: float, tells_last: bool = False
    ) -> None:
        """`exhausted`: the loader gives nothing more in this pass; `skip`: batches to draw and drop first.

        `tells_last`: a batch is given once the next one is drawn, so that the last one is known as such.
        """
        self.timeout_s = timeout_s
        self._loader = loader
        self._skip = skip
        self._drawn: queue.SimpleQueue[Raw] = queue.SimpleQueue()
        self._tells_last = tells_last
        self._room = threading.Semaphore(1 + tells_last)
        self._next: Raw | None = None
        self._closed = False
        self._last: Raw | None = None
        self._count = skip
        if exhausted:
            self._last = Raw(state=snapshot(loader, self._count, exhausted=True))
            return
        # On the caller's thread, as without balancing: a DataLoader draws its seed and starts its workers here.
        try:
            iterator = iter(loader)
        except Exception as e:
            self._last = Raw(error=e)  # told to all ranks, as of any batch
            return
        self._thread = threading.Thread(target=self._run, args=(iterator,), name="fs_data reader", daemon=True)
        self._thread.start()

    def take(self) -> Raw:
        """The next batch; a loader that takes longer than `timeout_s` is an error like any other of it."""
        start = time.perf_counter()
        raw = self._next or self._wait()
        if self._tells_last and raw.batch is not None:
            self._next = self._wait()
            raw.is_last = self._next.batch is None and self._next.error is None
        raw.wait_s = time.perf_counter() - start
        return raw

    def _wait(self) -> Raw:
        if self._last is not None:
            return self._last
        try:
            raw = self._drawn.get(timeout=self.timeout_s)
        except queue.Empty:
            error = TimeoutError(f"the wrapped {type(self._loader).__name__} gave no batch within {self.timeout_s} s")
            raw = Raw(error=error)
        if raw.batch is None:
            self._last = raw
        else:
            self._room.release()
        return raw

    def close(self) -> None:
        self._closed = True
        self._room.release()

    def join(self, timeout_s: float) -> None:
        if hasattr(self, "_thread"):
            self._thread.join(timeout_s)

    def _run(self, iterator: Iterator[Any]) -> None:
        while self._room.acquire() and not self._closed:
            try:
                raw = self._draw(iterator)
            except BaseException as e:
                raw = Raw(error=e)
            self._drawn.put(raw)
            if raw.batch is None:
                return

    def _draw(self, iterator: Iterator[Any]) -> Raw:
        while self._skip:
            self._skip -= 1
            next(iterator, None)
        try:
            batch = next(iterator)
        except StopIteration:
            return Raw(state=snapshot(self._loader, self._count, exhausted=True))
        if batch is None:
            raise ValueError(f"the wrapped {type(self._loader).__name__} gave None in place of a batch")
        self._count += 1
        return Raw(batch=batch, drawn=drawn_event(batch), state=snapshot(self._loader, self._count, exhausted=False))


def snapshot(loader: object, count: int, *, exhausted: bool) -> dict[str, Any]:
    """Where the loader stands after `count` batches, as plain values that later draws do not change."""
    inner = copy.deepcopy(loader.state_dict()) if has_state(loader) else None  # pyright: ignore
    return {"inner": inner, "count": count, "exhausted": exhausted}


def has_state(loader: object) -> bool:
    # Accelerate's loaders have the methods, and fail in them unless the loader within has them too.
    loader = getattr(loader, "base_dataloader", loader)
    return hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict")
