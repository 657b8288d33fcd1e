"""One pass over the data: a thread balances batches ahead of the training loop, and hands them out in lock step.

Batch i is handed out once batch i+1 is balanced or known not to exist, and once all ranks have asked for it: that vote
is one small AllGather, and it is where a rank that left the loop, or failed alone, becomes an error on all others. So
during step i the thread balances batch i+2.
"""

import atexit
import logging
import queue
import sys
import threading
import time
import weakref
from dataclasses import dataclass
from typing import Any

import numpy as np

from fs_data.errors import Disagreement, RankFailed, RankStopped
from fs_data.exchange import Balanced, Exchange, Raw
from fs_data.reader import Reader
from fs_data.world import World, gather_texts

logger = logging.getLogger(__name__)

_EXIT_PATIENCE_S = 10.0


@dataclass(kw_only=True)
class Handed:
    """What one `next()` gives out."""

    current: Balanced
    following: Balanced | None
    """The batch after it, whose ids may be prefetched; None at the end."""
    state: dict[str, Any]
    """Where this rank's loader stands for a run that resumes after `current`."""
    exposed_wait_s: float = 0.0
    """How long the caller was blocked."""


@dataclass(frozen=True)
class _Request:
    optimizer_steps: int = 0
    stop: str | None = None
    """Why this rank leaves the loop; None to go on."""


class Pipeline:
    """Starts at once; `next` and `stop` are for the training thread, all that is collective for the background one."""

    def __init__(self, world: World, exchange: Exchange, reader: Reader) -> None:
        self.world, self.exchange, self.reader = world, exchange, reader
        self.end_state: dict[str, Any] | None = None
        """This rank's state after the whole pass."""
        self.compute_ns = -1
        """Compute time of the step that the next header reports."""
        self._requests: queue.SimpleQueue[_Request] = queue.SimpleQueue()
        self._replies: queue.SimpleQueue[Handed | BaseException | None] = queue.SimpleQueue()
        self._outcome: BaseException | None = None
        self._over = False
        self._thread = threading.Thread(target=self._run, name="fs_data exchange", daemon=True)
        _stop_at_exit(self)
        self._thread.start()

    def next(self, optimizer_steps: int = 0) -> Handed | None:
        """The next batch and the one after it; None at the end. Raises what stopped the pass, again at every call."""
        if self._over:
            if self._outcome is not None:
                raise self._outcome
            return None
        start = time.perf_counter()
        self._requests.put(_Request(optimizer_steps))
        # Not forever: whatever the thread waits for has a time limit.
        reply = self._replies.get()
        if isinstance(reply, Handed):
            reply.exposed_wait_s = time.perf_counter() - start
            return reply
        self._over, self._outcome = True, reply
        if reply is not None:
            raise reply
        return None

    def stop(self, reason: str) -> None:
        """Leaves the loop; returns at once. The other ranks raise at their next batch, unless they leave as well."""
        if not self._over:
            self._over = True
            self._requests.put(_Request(stop=reason))
        self.reader.close()

    def join(self, timeout_s: float) -> bool:
        """Waits for the thread to end after `stop` or the last batch; whether it did."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            self._serve()
            self._replies.put(None)
        except BaseException as e:
            self._replies.put(e)
        self.reader.close()

    def _serve(self) -> None:
        raw, current = self._balance()
        if current is None:
            return
        next_raw, following = self._balance()
        while current is not None:
            request = self._requests.get()
            if not self._vote(request, current, following):
                return
            state = raw.state if next_raw.batch is not None else next_raw.state
            self._replies.put(Handed(current=current, following=following, state=state))
            raw, current = next_raw, following
            if following is not None:
                next_raw, following = self._balance()

    def _balance(self) -> tuple[Raw, Balanced | None]:
        raw = self.reader.take()
        balanced = self.exchange.step(raw, self.compute_ns)
        if balanced is None:
            # The next pass is a whole one; a rank that stops early with the others has no state at the end of its data.
            inner = raw.state["inner"] if raw.batch is None else None
            self.end_state = {"inner": inner, "count": 0, "exhausted": False}
        return Raw(batch=raw.batch is not None or None, state=raw.state), balanced  # the raw batch itself may go

    def _vote(self, request: _Request, current: Balanced, following: Balanced | None) -> bool:
        """Whether all ranks go on; raises if only some do, or if one cannot."""
        error = current.error or (following.error if following else None)
        step = current.step
        mine = np.asarray([error is not None, request.stop is not None, request.optimizer_steps], np.int64)
        failed, stopped, optimizer_steps = self.world.gather(mine, f"all ranks' call for batch {step}").T
        if failed.any():
            texts = gather_texts(self.world, f"{type(error).__name__}: {error}" if error else "")
            ranks = tuple(np.flatnonzero(failed).tolist())
            raise RankFailed(ranks, "; ".join(f"rank {r} failed at batch {step}: {texts[r]}" for r in ranks)) from error
        if stopped.all():
            return False
        if stopped.any():
            texts = gather_texts(self.world, request.stop or "")
            ranks = tuple(np.flatnonzero(stopped).tolist())
            why = "; ".join(f"rank {r} left the loop before batch {step} ({texts[r]})" for r in ranks)
            if request.stop is not None:
                logger.warning("%s while other ranks went on, which now raise", why)
                return False
            raise RankStopped(ranks, f"{why}, this rank did not; all ranks must leave it together")
        if (optimizer_steps != optimizer_steps[0]).any():
            raise Disagreement(
                f"all ranks must take the same optimizer steps: before batch {step} they had taken "
                f"{optimizer_steps.tolist()}, by rank; a rank that skips a batch with `continue` must do so on all "
                "ranks"
            )
        return True


_live: "weakref.WeakSet[Pipeline]" = weakref.WeakSet()


def _stop_at_exit(pipeline: Pipeline) -> None:
    if not _live:
        atexit.register(_say_goodbye)
    _live.add(pipeline)


def _say_goodbye() -> None:
    """A process that ends inside a loop tells the others why, in place of a broken connection."""
    error = getattr(sys, "last_value", None)
    reason = f"its process ended: {type(error).__name__}: {error}" if error else "its process ended"
    for pipeline in list(_live):
        pipeline.stop(reason)
    for pipeline in list(_live):
        pipeline.join(_EXIT_PATIENCE_S)
