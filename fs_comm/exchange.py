"""One operation: what a rank brings to it, and what the roads need to carry it out."""

import threading
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

from fs_comm.errors import CommTimeout, Mismatch
from fs_comm.mesh import Mesh, Message
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
    sequence: int = 0

    def __str__(self) -> str:
        return f"{self.op.name.lower()} of {DTYPE_NAME[self.dtype]} (number {self.sequence})"


class Turn:
    """An exchange while it is carried out: the other ranks' headers, messages about its parts, and the time left.

    Args:
        between: Called by roads between two pieces of long work, for the others to go on.
    """

    def __init__(self, exchange: Exchange, mesh: Mesh, *, timeout_s: float, between: Callable[[], None]) -> None:
        self.exchange, self.mesh, self.between = exchange, mesh, between
        self.headers: dict[int, Header] = {}
        """Of each peer, once it takes part."""
        self._timeout_s, self._deadline = timeout_s, time.monotonic() + timeout_s

    @property
    def left_s(self) -> float:
        return self._deadline - time.monotonic()

    def tell(self, peer: int, kind: Kind) -> None:
        x = self.exchange
        self.mesh.send(peer, Header(kind, x.sequence, x.op, x.dtype), timeout_s=self.left_s)

    def collect(self, kind: Kind, peers: Collection[int]) -> dict[int, Message]:
        """The next message of each of `peers`, whichever comes first."""
        found: dict[int, Message] = {}
        while waiting := [p for p in peers if p not in found]:
            self.wait(waiting)
            for peer in waiting:
                if (message := self.mesh.take(peer)) is not None:
                    self.must_be((kind,), peer, message)
                    found[peer] = message
        return found

    def wait(self, peers: Collection[int]) -> None:
        """Until one of `peers` has said something."""
        if not self.mesh.wait(peers, timeout_s=self.left_s):
            raise self.timeout(peers)

    def timeout(self, peers: Collection[int]) -> CommTimeout:
        names = ", ".join(self.mesh.name_of(p) for p in sorted(peers))
        return CommTimeout(f"{self.exchange}: waited {self._timeout_s:.0f} s for {names}, not done in that time")

    def must_be(self, kinds: Collection[Kind], peer: int, message: Message) -> None:
        if message[0].kind not in kinds:
            raise Mismatch(
                f"{self.exchange}: expected a {' or '.join(k.name for k in kinds)} message of "
                f"{self.mesh.name_of(peer)}, got {message[0].kind.name}"
            )


class Road(Protocol):
    """Carries the large parts of exchanges between this rank and those peers that it joins it to.

    Roads of several kinds serve one exchange: all begin, then each completes, in the same order on all ranks.
    """

    def begin(self, turn: Turn, sends: Sequence[int], receives: Sequence[int]) -> None:
        """Starts, without waiting; peers to which the exchange has a large part, and those from which."""
        ...

    def advance(self) -> None:
        """Goes on, without waiting; does nothing where that happens by itself."""
        ...

    def complete(self) -> None:
        """Waits until this rank has its parts, and may change those it gave.

        Raises:
            PeerLost, CommTimeout: And the data may be wrong.
        """
        ...

    def break_off(self) -> None:
        """From any thread, when the group has failed: ends `complete` here and at the peers, with an error."""
        ...

    def close(self) -> None:
        """Once no exchange is under way."""
        ...
