"""One thread a group that carries its exchanges out in the order they were asked for.

An exchange begins with a header to each peer that says what this rank takes part in and what it has for the peer. So
ranks that disagree get an error that names both views, and a rank that waits knows for whom. Small parts come with the
header, large ones by the roads that join the ranks.
"""

import queue
import threading
from collections.abc import Mapping, Sequence

import torch

from fs_comm.errors import GroupClosed, Mismatch
from fs_comm.exchange import INLINE_BYTES, Exchange, Road, Turn
from fs_comm.mesh import Mesh
from fs_comm.transports.memory import copy
from fs_comm.wire import Header, Kind

EXIT_S = 5.0
"""How long a process that ends waits for an exchange to break off, and for callbacks."""


class Engine:
    """Runs exchanges.

    Args:
        roads: In the order in which they complete, which must be the same on all ranks.
        road_to: The one that joins this rank to each peer.
    """

    def __init__(self, mesh: Mesh, *, timeout_s: float, roads: Sequence[Road], road_to: Mapping[int, Road]) -> None:
        self.mesh, self.timeout_s = mesh, timeout_s
        self._roads, self._road_to = tuple(roads), dict(road_to)
        self._others = [(mesh.rank + k) % mesh.size for k in range(1, mesh.size)]  # each rank begins with another peer
        self._queue: queue.SimpleQueue[Exchange | None] = queue.SimpleQueue()
        self._order = threading.Lock()  # of sequence numbers
        self._running = threading.Lock()  # held while an exchange is carried out
        self._num_queued = 0
        self._sequence = 0
        self._failed: BaseException | None = None
        self._closing = False
        self._thread = threading.Thread(target=self._serve, name="fs_comm", daemon=True)
        self._thread.start()

    def submit(self, exchange: Exchange) -> None:
        """Leaves it to the engine's thread."""
        with self._order:
            self._number(exchange)
            self._num_queued += 1
            self._queue.put(exchange)

    def run(self, exchange: Exchange) -> None:
        """As `submit`, but if nothing is under way, does it on this thread, which would only wait for the other."""
        with self._order:
            self._number(exchange)
            if not (is_mine := not self._num_queued and self._running.acquire(blocking=False)):
                self._num_queued += 1
                self._queue.put(exchange)
        if not is_mine:
            self._wait_for(exchange)
            return
        try:
            self._carry_out(exchange)
        finally:
            self._running.release()

    def _wait_for(self, exchange: Exchange) -> None:
        """An interrupt fails the group, as it does in an exchange on this thread: which of them it hits is chance."""
        try:
            exchange.done.wait()
        except BaseException as error:
            self._fail(error)
            raise

    def close(self) -> None:
        """Lets queued exchanges end, then leaves; waits a timeout at most, and may be called twice."""
        with self._order:
            if not self._closing:
                self._closing = True
                self._queue.put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join(self.timeout_s)

    def abort(self) -> None:
        """Fails what is under way, here and at the peers."""
        self._fail(GroupClosed("the group was aborted"))
        self.close()

    def at_exit(self) -> None:
        """As the process ends: ends what is under way; else torch aborts a process with threads in it."""
        if self._num_queued and self._failed is None:
            self._failed = GroupClosed("the process is ending")
            self.mesh.close(None)  # to peers, this one has ended
            for road in self._roads:
                road.break_off()
            with self._order:
                self._closing = True
                self._queue.put(None)
            self._thread.join(EXIT_S)

    def after_fork(self) -> None:
        """In the child, which has none of this engine's threads."""
        self._order, self._running = threading.Lock(), threading.Lock()  # another thread may have held them
        self._failed = GroupClosed("it was made before this process was forked; a child makes groups of its own")
        self.mesh.after_fork()

    def _number(self, exchange: Exchange) -> None:
        if self._failed is not None:
            raise GroupClosed(f"the group failed before and is of no use any more: {self._why()}") from self._failed
        if self._closing:
            raise GroupClosed("the group was shut down; make a new one")
        self._sequence += 1
        exchange.sequence = self._sequence

    def _serve(self) -> None:
        while (exchange := self._queue.get()) is not None:
            with self._running:
                self._carry_out(exchange)
            with self._order:
                self._num_queued -= 1
            del exchange  # an idle thread must hold no tensors
        with self._running:
            self.mesh.close(Header(Kind.BYE, self._sequence) if self._failed is None else None)
            for road in self._roads:
                road.close()

    def _carry_out(self, x: Exchange) -> None:
        try:
            if self._failed is not None:
                raise GroupClosed(f"the group failed before: {self._why()}") from self._failed
            with torch.inference_mode():  # what may be written to is the caller's modes to say, not this thread's
                self._exchange(x)
                x.finish()
        except BaseException as error:
            x.error = self._failed if isinstance(self._failed, GroupClosed) else error  # aborted, rather than broken
            self._fail(error)
        x.done.set()

    def _fail(self, error: BaseException) -> None:
        """Tells the peers, before anything that they may still be reading can change."""
        if self._failed is None:
            self._failed = error
            lost = " ".join(map(str, self.mesh.lost()))
            text = f"{type(error).__name__} {lost}\n{self._why()}".encode()[:4096]
            self.mesh.close(Header(Kind.FAILED, self._sequence, payload=len(text)), text)
            for road in self._roads:
                road.break_off()

    def _why(self) -> str:
        """It failed; some errors, such as KeyboardInterrupt, have a name only."""
        return str(self._failed) or type(self._failed).__name__

    def _exchange(self, x: Exchange) -> None:
        turn = Turn(x, self.mesh, timeout_s=self.timeout_s, between=self._advance)
        for peer in self._others:
            data = x.send[peer].numpy().tobytes() if len(x.send[peer]) <= INLINE_BYTES else b""
            address = x.send[peer].data_ptr() if len(x.send[peer]) else 0
            sizes = len(x.send[peer]), len(x.receive[peer])
            header = Header(Kind.DATA, x.sequence, x.op, x.dtype, *sizes, address, len(data))
            self.mesh.send(peer, header, data, timeout_s=turn.left_s)
        copy(x.receive[self.mesh.rank], x.send[self.mesh.rank])
        for peer, (header, data) in turn.collect(Kind.DATA, self._others).items():
            self._check(x, peer, header)
            turn.headers[peer] = header
            if data:
                copy(x.receive[peer], torch.frombuffer(bytearray(data), dtype=torch.uint8))
        sends = {p for p in self._others if len(x.send[p]) > INLINE_BYTES}
        receives = {p for p in self._others if len(x.receive[p]) > INLINE_BYTES}
        under_way: list[Road] = []
        for road in self._roads:
            theirs = [p for p in self._others if self._road_to[p] is road]
            if sends.intersection(theirs) or receives.intersection(theirs):
                road.begin(turn, [p for p in theirs if p in sends], [p for p in theirs if p in receives])
                under_way.append(road)
        for road in under_way:
            road.complete()

    def _advance(self) -> None:
        for road in self._roads:
            road.advance()

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
