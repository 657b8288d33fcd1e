"""One pass over the data: a thread balances batches ahead of the training loop, and hands them out in lock step.

Batch i is handed out once batch i+1 is balanced or known not to exist, and once all ranks have asked for it: that vote
is one small AllGather, and it is where a rank that left the loop, or failed alone, becomes an error on all others. So
during step i the thread balances batch i+2.
"""

import atexit
import functools
import logging
import queue
import sys
import threading
import time
import weakref
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from fs_data.agree import raise_failures
from fs_data.device import Lane, Moved
from fs_data.errors import Disagreement, LoaderError, RankStopped
from fs_data.exchange import Balanced, Exchange
from fs_data.reader import Reader
from fs_data.stats import StepStats, step_stats
from fs_data.world import World, gather_texts

logger = logging.getLogger(__name__)

_EXIT_PATIENCE_S = 10.0


@dataclass(kw_only=True)
class Ready:
    """A balanced batch, on its device or on the way there."""

    balanced: Balanced
    moved: Moved
    state: dict[str, Any]
    """The wrapped loader's after this rank's batch of the step."""
    stats: StepStats


@dataclass(kw_only=True)
class Handed:
    """What one `next()` gives out."""

    current: Ready
    following: Ready | None
    """The batch after it, whose ids may be prefetched; None at the end."""
    state: dict[str, Any]
    """Where this rank's loader stands for a run that resumes after `current`."""
    exposed_wait_s: float = 0.0
    """How long the caller was blocked."""


@dataclass(frozen=True)
class _Request:
    optimizer_steps: int = 0
    compute_ns: int = -1
    """Of the step before the last one, for the header of the exchange that follows."""
    stop: str | None = None
    """Why this rank leaves the loop; None to go on."""


class Pipeline:
    """Starts at once; `next` and `stop` are for the training thread, all that is collective for the background one."""

    def __init__(self, world: World, exchange: Exchange, reader: Reader, lane: Lane) -> None:
        self.world, self.exchange, self.reader, self.lane = world, exchange, reader, lane
        self.end_state: dict[str, Any] | None = None
        """This rank's state after the whole pass."""
        self._requests: queue.SimpleQueue[_Request] = queue.SimpleQueue()
        self._replies: queue.SimpleQueue[Handed | BaseException | None] = queue.SimpleQueue()
        self._final_state: dict[str, Any] = {}
        self._in_step = threading.Semaphore(0)
        self._outcome: BaseException | None = None
        self._over = False
        self.thread = threading.Thread(target=self._run, name="fs_data exchange", daemon=True)
        _live.add(self)
        _register_goodbye()
        self.thread.start()

    def next(self, optimizer_steps: int = 0, compute_ns: int = -1) -> Handed | None:
        """The next batch and the one after it; None at the end. Raises what stopped the pass, again at every call."""
        if self._over:
            if self._outcome is not None:
                raise self._outcome
            return None
        start = time.perf_counter()
        self.exchange.pace.allow()
        self._requests.put(_Request(optimizer_steps, compute_ns))
        # Not forever: whatever the thread waits for has a time limit.
        reply = self._replies.get()
        if isinstance(reply, Handed):
            reply.exposed_wait_s = time.perf_counter() - start
            return reply
        self._over, self._outcome = True, reply
        if reply is not None:
            raise reply
        return None

    def step_begins(self) -> None:
        """Called when the batch of the last `next` is about to be trained on: balancing goes on beside it."""
        self._in_step.release()

    def stop(self, reason: str, outcome: LoaderError | None = None) -> None:
        """Leaves the loop; returns at once. The other ranks raise at their next batch, unless they leave as well.

        `outcome` is what `next` raises from now on; None lets it end as after the last batch.
        """
        if not self._over:
            self._over, self._outcome = True, outcome
            self._requests.put(_Request(stop=reason))
        self._in_step.release()
        self.exchange.pace.allow()  # the exchange under way is finished first: other ranks are in it too

    def join(self, timeout_s: float) -> bool:
        """Waits for the thread to end after `stop` or the last batch; whether it did."""
        self.thread.join(timeout_s)
        return not self.thread.is_alive()

    def _run(self) -> None:
        try:
            self._serve()
            self._replies.put(None)
        except BaseException as e:
            self._replies.put(e)
        self.reader.close()

    def _serve(self) -> None:
        self.exchange.pace.allow()
        current = self._balance(-1)
        following = self._balance(-1) if current else None
        while current is not None:
            request = self._requests.get()
            if not self._vote(request, current, following):
                return
            # A rank whose data ended must not begin them anew when it resumes in the middle of a pass.
            later = following.state if following else self._final_state
            state = later if later["exhausted"] else current.state
            self.exchange.pace.hold()
            self._replies.put(Handed(current=current, following=following, state=state))
            # Else this thread would keep the interpreter, for up to its switch interval, from the one that trains.
            self._in_step.acquire()
            current, following = following, self._balance(request.compute_ns) if following else None

    def _balance(self, compute_ns: int) -> Ready | None:
        raw = self.reader.take()
        with self.lane.enter(raw.batch, raw.drawn):
            balanced = self.exchange.step(raw, compute_ns)
            if balanced is None:
                self._final_state = raw.state
                # The next pass is a whole one. A rank that stops early with the others has no state at its data's end.
                inner = raw.state["inner"] if raw.batch is None else None
                self.end_state = {"inner": inner, "count": 0, "exhausted": False}
                return None
            return Ready(
                balanced=balanced, moved=self._move(balanced), state=raw.state, stats=step_stats(balanced, raw.wait_s)
            )

    def _move(self, balanced: Balanced) -> Moved:
        if balanced.error is None:
            try:
                with torch.profiler.record_function("fs_data::move_to_device"):
                    return self.lane.move(balanced.batch)
            except Exception as e:
                balanced.error = e  # told to the other ranks when all call for the batch
        return Moved(None)

    def _vote(self, request: _Request, current: Ready, following: Ready | None) -> bool:
        """Whether all ranks go on; raises if only some do, or if one cannot."""
        error, step = current.balanced.error, current.balanced.step
        ahead = 0
        if error is None and following is not None:
            error, ahead = following.balanced.error, 1
        mine = np.asarray(
            [(1 + ahead) * (error is not None), request.stop is not None, request.optimizer_steps], np.int64
        )
        failed, stopped, optimizer_steps = self.world.gather(mine, f"all ranks' call for batch {step}").T
        if failed.any():
            raise_failures(self.world, failed, error, f"batch {step + int(failed[failed > 0].min()) - 1}")
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
        if (detached := optimizer_steps < 0).any() and not detached.all():
            raise Disagreement(
                f"attach(model, optimizer) must be called on all ranks, or on none; before batch {step} ranks "
                f"{np.flatnonzero(detached).tolist()} had not"
            )
        if (optimizer_steps != optimizer_steps[0]).any():
            raise Disagreement(
                f"all ranks must take the same optimizer steps: before batch {step} they had taken "
                f"{optimizer_steps.tolist()}, by rank; a batch that one rank skips with `continue` all must skip"
            )
        return True


_live: "weakref.WeakSet[Pipeline]" = weakref.WeakSet()


@functools.cache
def _register_goodbye() -> None:
    atexit.register(_say_goodbye)


def _say_goodbye() -> None:
    """A process that ends inside a loop tells the others why, in place of a broken connection."""
    error = getattr(sys, "last_value", None)
    reason = f"its process ended: {type(error).__name__}: {error}" if error else "its process ended"
    for pipeline in list(_live):
        pipeline.stop(reason)
    # Readers too, which may be drawing a batch still: C++ code that comes back to an interpreter that is gone aborts.
    deadline = time.monotonic() + _EXIT_PATIENCE_S
    for thread in threading.enumerate():
        if thread.name.startswith("fs_data "):
            thread.join(max(0.0, deadline - time.monotonic()))
