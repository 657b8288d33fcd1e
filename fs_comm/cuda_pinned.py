"""Exchanges of device memory between hosts: copy engine, pinned memory, the group's roads for the CPU, and back.

A thread carries them out in segments of bounded size: while one segment travels, the next comes from the device and the
one before goes to it. Also the way within a host where ranks may not share memory, or it cannot be registered.
"""

import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from fs_comm.cuda_job import Copies, Event, Job
from fs_comm.errors import CommTimeout, GroupClosed
from fs_comm.exchange import Exchange
from fs_comm.staging import WORD, View
from fs_comm.wire import Op

STAGING_BYTES = 64 << 20
MAX_SEGMENT_BYTES = 4 << 20
_SEGMENTS = 3  # one comes from the device, one travels, one goes to the device
_INT64 = 8


class Host(Protocol):
    """The exchanges of CPU memory that the segments go by, which none else uses."""

    def run(self, exchange: Exchange) -> None: ...
    def close(self) -> None: ...
    def abort(self) -> None: ...


class PinnedEngine:
    """As `CudaEngine`, for ranks that need not share a host.

    Args:
        host: Owned, and closed with the engine.
    """

    def __init__(
        self, host: Host, rank: int, size: int, copies: Copies, device: torch.device, *, timeout_s: float
    ) -> None:
        self.rank, self.size, self.copies, self.device, self.timeout_s = rank, size, copies, device, timeout_s
        self._host = host
        self.segment_bytes = min(MAX_SEGMENT_BYTES, STAGING_BYTES // (2 * _SEGMENTS * size) // 4096 * 4096)
        shape = (_SEGMENTS, size, self.segment_bytes)
        is_cuda = device.type == "cuda"
        self._out, self._in = (torch.empty(shape, dtype=torch.uint8, pin_memory=is_cuda) for _ in range(2))
        self._to_device: list[Event] = []
        self._sequence = 0
        self._failed: BaseException | None = None
        self._closing = False
        self._submitting = threading.Lock()
        self._queue: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._serve, name="fs_comm_cuda", daemon=True)
        self._thread.start()

    def submit(
        self, op: Op, dtype: int, sends: Sequence[Tensor], receives: Sequence[Tensor], finish: Callable[[], None] | None
    ) -> Job:
        """See `CudaEngine.submit`."""
        with self._submitting:
            if self._failed is not None:
                raise GroupClosed(
                    f"the group failed before and is of no use any more: {self._failed}"
                ) from self._failed
            if self._closing:
                raise GroupClosed("the group was shut down; make a new one")
            self._sequence += 1
            num_bytes = [
                (t.numel() * t.element_size(), u.numel() * u.element_size())
                for t, u in zip(sends, receives, strict=True)
            ]
            views = [View(self._sequence & WORD, op, dtype, *n) for n in num_bytes]
            job = Job(self._sequence, views, [], sends, receives, finish, self.copies.mark_caller())
            self._queue.put(job)
            return job

    def close(self) -> None:
        """Lets what is under way end, then leaves; waits a timeout at most, and may be called twice."""
        with self._submitting:
            if not self._closing:
                self._closing = True
                self._queue.put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join(self.timeout_s)

    def abort(self) -> None:
        """Fails what is under way, here and at the peers."""
        self._failed = self._failed or GroupClosed("the group was aborted")
        self._host.abort()
        self.close()

    def close_sockets(self) -> None:
        """In a forked child: the exchanges of CPU memory see to theirs."""

    def _serve(self) -> None:
        self.copies.use_in_thread()
        while (job := self._queue.get()) is not None:
            try:
                if self._failed is not None:
                    raise GroupClosed(f"the group failed before: {self._failed}") from self._failed
                self._carry_out(job)
            except BaseException as error:
                job.error = self._failed if isinstance(self._failed, GroupClosed) else error
                self._failed = self._failed or error
                self._host.abort()
            job.sends = job.receives = ()
            job.given.set()
            del job  # an idle thread must hold no tensors
        self._host.close()
        self.copies.close()

    def _carry_out(self, job: Job) -> None:
        num_segments = self._agree_on_segments(job)
        self._wait(job, self._to_device)  # out of the memory that comes to be written now
        self.copies.begin(job.after)
        taken: list[list[Event]] = []
        put = self._put(job, 0) if num_segments else []
        for n in range(num_segments):
            self._wait(job, put)
            if n >= 2:
                self._wait(job, taken[n - 2])
            put = self._put(job, n + 1) if n + 1 < num_segments else []
            self._travel(job, n)
            taken.append(self._take(job, n))
        self._to_device = [event for events in taken[-2:] for event in events]
        self.copies.join()
        if job.finish is not None:
            job.finish()
        for tensor in {t.untyped_storage().data_ptr(): t for t in job.receives}.values():
            self.copies.keep(tensor, puts=False)
        job.event = self.copies.end()

    def _agree_on_segments(self, job: Job) -> int:
        """As many as the longest part of any rank needs; all ranks take part in all of them."""
        most = max(max(v.num_bytes, v.expected) for v in job.views)
        mine = torch.tensor([most]).view(torch.uint8)
        all_most = torch.zeros(self.size, _INT64, dtype=torch.uint8)
        self._run(job, [mine] * self.size, list(all_most))
        return -(-int(all_most.view(torch.int64).max()) // self.segment_bytes)

    def _put(self, job: Job, n: int) -> list[Event]:
        """Starts to bring segment n of what this rank sends to the host."""
        gathers, k = job.views[0].op == Op.ALL_GATHER, self.copies.num_streams
        peers = [self.rank] if gathers else range(self.size)
        for peer in peers:
            if num_bytes := self._length(job.views[peer].num_bytes, n):
                source = job.sends[peer].data_ptr() + n * self.segment_bytes
                self.copies.put(peer % k, self._out[n % _SEGMENTS, peer].data_ptr(), source, num_bytes)
        return [self.copies.mark(stream) for stream in range(k)]

    def _travel(self, job: Job, n: int) -> None:
        """Segment n from all ranks' hosts to all ranks' hosts; a rank's own part stays where it is."""
        gathers = job.views[0].op == Op.ALL_GATHER
        sends: list[Tensor] = []
        receives: list[Tensor] = []
        for peer, view in enumerate(job.views):
            is_own = peer == self.rank
            there = self._out[n % _SEGMENTS, self.rank if gathers else peer]
            sends.append(there[: 0 if is_own else self._length(view.num_bytes, n)])
            receives.append(self._in[n % _SEGMENTS, peer, : 0 if is_own else self._length(view.expected, n)])
        self._run(job, sends, receives)

    def _take(self, job: Job, n: int) -> list[Event]:
        """Starts to bring segment n of what this rank receives to the device."""
        k = self.copies.num_streams
        for peer, view in enumerate(job.views):
            if num_bytes := self._length(view.expected, n):
                source = (self._out if peer == self.rank else self._in)[n % _SEGMENTS, peer]
                target = job.receives[peer].data_ptr() + n * self.segment_bytes
                self.copies.take(k + peer % k, target, source.data_ptr(), num_bytes)
        return [self.copies.mark(k + stream) for stream in range(k)]

    def _length(self, num_bytes: int, n: int) -> int:
        return min(self.segment_bytes, max(0, num_bytes - n * self.segment_bytes))

    def _run(self, job: Job, sends: Sequence[Tensor], receives: Sequence[Tensor]) -> None:
        exchange = Exchange(Op(job.views[0].op), job.views[0].dtype, sends, receives)
        self._host.run(exchange)
        if not exchange.done.wait(2 * self.timeout_s):  # the host's own limit comes first, and names the peer
            raise CommTimeout(f"{job}: waited {2 * self.timeout_s:.0f} s for the exchange of host memory")
        if exchange.error is not None:
            raise exchange.error

    def _wait(self, job: Job, events: Sequence[Event]) -> None:
        deadline = time.monotonic() + self.timeout_s
        while not all(event.query() for event in events):
            if self._failed is not None:
                raise self._failed
            if time.monotonic() > deadline:
                raise CommTimeout(f"{job}: waited {self.timeout_s:.0f} s for this rank's own device")
            time.sleep(0.00005)
