"""One thread a group that carries its exchanges out in the order they were asked for.

An exchange begins with a header to each peer that says what this rank takes part in and what it has for the peer. So
ranks that disagree get an error that names both views, and a rank that waits knows for whom. Then each rank takes its
bytes, and tells the owner when it is done with them.
"""

import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fs_comm.errors import CommTimeout, GroupClosed, Mismatch
from fs_comm.mesh import Mesh
from fs_comm.transports.memory import SLOT_BYTES, Staging, read_from
from fs_comm.wire import DTYPE_NAME, Header, Kind, Op

INLINE_BYTES = 16 << 10
"""Data of at most that size travels with the header. Small enough for a socket's buffer to hold two of them."""


@dataclass(slots=True, eq=False)
class Exchange:
    """One rank's part of an operation."""

    op: Op
    dtype: int
    send: Sequence[Tensor]
    """`(n,)` uint8, contiguous, on the CPU, for each rank; what is for this rank itself too."""
    receive: Sequence[Tensor]
    """`(n,)` uint8 from each rank."""
    finish: Callable[[], None] = lambda: None
    """Run once all bytes are there, before `done` is set."""
    done: threading.Event = field(default_factory=threading.Event)
    error: BaseException | None = None
    on_done: Callable[[], None] = lambda: None
    sequence: int = 0

    def __str__(self) -> str:
        return f"{self.op.name.lower()} of {DTYPE_NAME[self.dtype]} (number {self.sequence})"


class Engine:
    """Runs exchanges over shared memory, or between hosts by `elsewhere`."""

    def __init__(
        self,
        mesh: Mesh,
        *,
        timeout_s: float,
        attach: bool,
        staging: Staging | None,
        elsewhere: Callable[[Exchange], None] | None,
        on_end: Callable[[], None] = lambda: None,
    ) -> None:
        self.mesh, self.timeout_s = mesh, timeout_s
        self.attach, self.staging, self._elsewhere, self._on_end = attach, staging, elsewhere, on_end
        self._others = [(mesh.rank + k) % mesh.size for k in range(1, mesh.size)]  # each rank begins with another peer
        self._queue: queue.SimpleQueue[Exchange | None] = queue.SimpleQueue()
        self._sequence = 0
        self._failed: BaseException | None = None
        self._closing = False
        self._thread = threading.Thread(target=self._serve, name="fs_comm", daemon=True)
        self._thread.start()

    def submit(self, exchange: Exchange) -> None:
        if self._failed is not None:
            raise GroupClosed(f"the group failed before and is of no use any more: {self._failed}") from self._failed
        if self._closing:
            raise GroupClosed("the group was shut down; make a new one")
        self._queue.put(exchange)

    def close(self) -> None:
        """Lets queued exchanges end, then leaves; waits a timeout at most, and may be called twice."""
        if not self._closing:
            self._closing = True
            self._queue.put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join(self.timeout_s)

    def abort(self) -> None:
        """Fails what is under way, here and at the peers."""
        self._failed = self._failed or GroupClosed("the group was aborted")
        self.mesh.close(Header(Kind.FAILED, 0, payload=len(b"aborted")), b"aborted")
        self.close()

    def _serve(self) -> None:
        while (exchange := self._queue.get()) is not None:
            self._sequence += 1
            exchange.sequence = self._sequence
            try:
                if self._failed is not None:
                    raise GroupClosed(f"the group failed before: {self._failed}")
                self._run(exchange)
                exchange.finish()
            except BaseException as error:
                exchange.error = error
                if self._failed is None:
                    self._failed = error
                    text = f"{exchange}: {error}".encode()[:4096]
                    self.mesh.close(Header(Kind.FAILED, self._sequence, payload=len(text)), text)
            exchange.done.set()
            exchange.on_done()
            del exchange  # an idle thread must hold no tensors
        if self._failed is None:
            self.mesh.close(Header(Kind.BYE, self._sequence))
        if self.staging is not None:
            self.staging.close()
        self._on_end()

    def _run(self, x: Exchange) -> None:
        deadline = time.monotonic() + self.timeout_s
        mine = self.mesh.rank
        is_inline = {p: len(x.send[p]) <= INLINE_BYTES for p in self._others}
        for peer in self._others:
            data = x.send[peer].numpy().tobytes() if is_inline[peer] else b""
            header = Header(
                Kind.DATA,
                x.sequence,
                x.op,
                x.dtype,
                len(x.send[peer]),
                len(x.receive[peer]),
                x.send[peer].data_ptr() if len(x.send[peer]) else 0,
                len(data),
            )
            self.mesh.send(peer, header, data, timeout_s=deadline - time.monotonic())
        x.receive[mine].copy_(x.send[mine])
        theirs = self._collect(x, Kind.DATA, self._others, deadline)
        for peer in self._others:
            self._check(x, peer, theirs[peer][0])
        large_in = [p for p in self._others if len(x.receive[p]) > INLINE_BYTES]
        large_out = [p for p in self._others if not is_inline[p]]
        for peer in self._others:
            if peer not in large_in and len(x.receive[peer]):
                x.receive[peer].copy_(torch.frombuffer(bytearray(theirs[peer][1]), dtype=torch.uint8))
        if self._elsewhere is not None:
            if large_in or large_out or x.op == Op.ALL_TO_ALL:
                self._elsewhere(x)
        elif self.attach:
            for peer in large_in:
                read_from(self.mesh.pids[peer], theirs[peer][0].address, x.receive[peer])
                self._tell_done(x, peer, deadline)
            self._collect(x, Kind.DONE, large_out, deadline)
        else:
            self._stage(x, large_out, large_in, deadline)

    def _stage(self, x: Exchange, large_out: list[int], large_in: list[int], deadline: float) -> None:
        """Slot by slot: fill those that are free, say so, take what came, say so."""
        assert self.staging is not None
        start = 0
        while large_out or large_in:
            stop = start + SLOT_BYTES
            for peer in large_out:
                part = x.send[peer][start:stop]
                self.staging.outgoing[peer][: len(part)].copy_(part)
                self._tell(x, Kind.DATA, peer, deadline)
            self._collect(x, Kind.DATA, large_in, deadline)
            for peer in large_in:
                part = x.receive[peer][start:stop]
                part.copy_(self.staging.incoming[peer][: len(part)])
                self._tell_done(x, peer, deadline)
            self._collect(x, Kind.DONE, large_out, deadline)
            large_out = [p for p in large_out if len(x.send[p]) > stop]
            large_in = [p for p in large_in if len(x.receive[p]) > stop]
            start = stop

    def _tell(self, x: Exchange, kind: Kind, peer: int, deadline: float) -> None:
        self.mesh.send(peer, Header(kind, x.sequence, x.op, x.dtype), timeout_s=deadline - time.monotonic())

    def _tell_done(self, x: Exchange, peer: int, deadline: float) -> None:
        self._tell(x, Kind.DONE, peer, deadline)

    def _collect(
        self, x: Exchange, kind: Kind, peers: Sequence[int], deadline: float
    ) -> dict[int, tuple[Header, bytes]]:
        """The next message of each of `peers`, whichever comes first."""
        found: dict[int, tuple[Header, bytes]] = {}
        while len(found) < len(peers):
            waiting = [p for p in peers if p not in found]
            ready = self.mesh.ready(waiting, timeout_s=deadline - time.monotonic())
            if not ready:
                names = ", ".join(self.mesh.name_of(p) for p in waiting)
                raise CommTimeout(f"{x}: waited {self.timeout_s:.0f} s for {names}, which did not take part in time")
            for peer in ready:
                header, payload = self.mesh.receive(peer, timeout_s=deadline - time.monotonic())
                if header.kind != kind:
                    raise Mismatch(
                        f"{x}: expected a {kind.name} message of {self.mesh.name_of(peer)}, got {header.kind.name}"
                    )
                found[peer] = (header, payload)
        return found

    def _check(self, x: Exchange, peer: int, theirs: Header) -> None:
        name = self.mesh.name_of(peer)
        if (theirs.sequence, theirs.op, theirs.dtype) != (x.sequence, x.op, x.dtype):
            raise Mismatch(
                f"all ranks must call the same operations in the same order: this rank is at {x}, {name} at "
                f"{theirs.operation()} (number {theirs.sequence})"
            )
        if theirs.num_bytes != len(x.receive[peer]):
            raise Mismatch(
                f"{x}: this rank expects {len(x.receive[peer])} bytes of {name}, which has {theirs.num_bytes} for it: "
                "sizes and splits of all ranks must fit"
            )
        if theirs.expected != len(x.send[peer]):
            raise Mismatch(
                f"{x}: this rank has {len(x.send[peer])} bytes for {name}, which expects {theirs.expected}: "
                "sizes and splits of all ranks must fit"
            )
