"""A link to one peer: slots to fill and slots to read, over one queue pair.

A slot's bytes go by one RDMA write with immediate into the peer's slot of the same number; the immediate carries the
message's number. Which slot is whose turn, and when the peer has room, is kept by verbs_credit.
"""

from collections import deque

from fs_comm.errors import PeerLost
from fs_comm.transports.verbs_binding import QueuePair, Region, Write
from fs_comm.transports.verbs_credit import (
    BYE,
    CREDIT,
    DATA,
    HELLO,
    ReceiveSlots,
    SendCredits,
    SendQueue,
    pack_immediate,
    unpack_immediate,
)
from fs_comm.transports.verbs_endpoint import Endpoint


def queue_depths(slots: int) -> tuple[int, int]:
    """(sends, receives) that a link's queue pair must hold (see verbs_credit)."""
    return 4 * slots + 8, 2 * slots + 2


class VerbsLink:
    """One peer's link. Not thread-safe; nothing blocks; `VerbsTransport.progress` brings the news.

    Attributes:
        peer: its rank in the group.
        name: the peer as messages call it.
        mine, peers: the two ends, for messages.
        queue_pair: number of this end's, by which completions name it.
        slot_bytes: the most bytes of a message.
        greeted: the peer's greeting has come.
        proven: both have, so that an address cannot be wrong any more.
        departed: the peer has closed its end; what has landed can still be read, nothing more will come.
    """

    def __init__(
        self,
        peer: int,
        pair: QueuePair,
        mine: Endpoint,
        peers: Endpoint,
        *,
        region: Region,
        outgoing: memoryview,
        outgoing_address: int,
        incoming: memoryview,
        name: str,
    ) -> None:
        slots = min(mine.slots, peers.slots)
        self.peer, self.mine, self.peers, self.name = peer, mine, peers, name
        self.queue_pair = pair.number
        self.slot_bytes = min(mine.slot_bytes, peers.slot_bytes)
        self.greeted = self.proven = self.departed = False
        self._ping: int | None = None
        self._pinged_at_s = 0.0
        self._pair = pair
        self._credits, self._slots = SendCredits(slots), ReceiveSlots(slots)
        self._queue = SendQueue(queue_depths(mine.slots)[0])
        self._consumed = 0
        self._acquired: deque[int] = deque()
        # Each end may have cut its memory into slots of another size: the stride is the owner's.
        self._outgoing = [outgoing[i * mine.slot_bytes :][: self.slot_bytes] for i in range(slots)]
        self._incoming = [incoming[i * mine.slot_bytes :][: self.slot_bytes] for i in range(slots)]
        self._writes: list[Write] = [
            pair.write(
                outgoing_address + i * mine.slot_bytes,
                region.local_key,
                peers.address + i * peers.slot_bytes,
                peers.key,
            )
            for i in range(slots)
        ]
        self._signal = pair.write(outgoing_address, region.local_key, peers.address, peers.key)

    # What the engine calls

    def acquire(self) -> memoryview | None:
        """The next slot to fill, `(slot_bytes,)` uint8, or None while the peer has no room: wait for the transport.

        Several may be acquired before the first is posted, so that copies into them overlap.

        Raises:
            PeerLost: the peer has closed its end.
        """
        if self.departed:
            raise PeerLost(f"{self.name} has closed its end of the verbs link; nothing can be sent to it")
        # One place is kept for control messages, which must not wait behind data.
        if self._queue.room <= len(self._acquired) + 1:
            return None
        number = self._credits.take()
        if number is None:
            return None
        self._acquired.append(number)
        return self._outgoing[number % self._credits.slots]

    def post(self, num_bytes: int) -> None:
        """Send the first `num_bytes` of the oldest slot that was acquired; returns at once."""
        if not self._acquired:
            raise ValueError("post() needs a slot from acquire(), none is held")
        if not 0 <= num_bytes <= self.slot_bytes:
            raise ValueError(f"a message must have 0 to {self.slot_bytes} bytes, got {num_bytes}")
        number = self._acquired.popleft()
        request, signalled = self._queue.post()
        write = self._writes[number % self._credits.slots]
        write.post(num_bytes, pack_immediate(DATA, number), request, signalled)

    def arrived(self) -> memoryview | None:
        """The next message that came, cut to its bytes, or None. It stays valid until its `release`."""
        found = self._slots.read()
        if found is None:
            return None
        slot, num_bytes = found
        return self._incoming[slot][:num_bytes]

    def release(self) -> None:
        """The oldest message from `arrived` is done with; its slot goes back to the peer."""
        self._slots.release()
        self._tell_credit()

    # What the transport calls

    @property
    def idle(self) -> bool:
        """All that was sent is acknowledged by the peer's adapter."""
        return self._queue.idle

    @property
    def acquainted(self) -> bool:
        """Both greetings have come. A peer that has parted had ours: it may have gone before it could say so."""
        return self.greeted and (self.idle or self.departed)

    def prepare(self) -> None:
        """Post the receives; before the peer may send."""
        self._pair.post_receives(queue_depths(self._slots.slots)[1])

    def greet(self) -> None:
        self._control(HELLO)

    def part(self) -> None:
        if self._queue.room:
            self._control(BYE)

    def unanswered_s(self, now_s: float) -> float:
        """For how long a ping has been on its way; 0 where none is."""
        return 0.0 if self._ping is None else now_s - self._pinged_at_s

    def ping(self, now_s: float) -> None:
        """An empty write, which the peer's adapter acknowledges by itself: fails if its process is gone."""
        if self._ping is None and self._queue.room:
            self._ping, _ = self._queue.post(signal=True)
            self._pinged_at_s = now_s
            self._signal.post(0, None, self._ping, True)

    def on_message(self, immediate: int, num_bytes: int) -> None:
        kind, number = unpack_immediate(immediate)
        self._consumed += 1
        if kind == DATA:
            self._slots.land(number, num_bytes)
        elif kind == CREDIT:
            self._credits.peer_has_released(number)
        elif kind == HELLO:
            self.greeted = True
        else:
            self.departed = True

    def on_sent(self, request: int) -> None:
        self._queue.complete(request)
        if self._ping is not None and request >= self._ping:
            self._ping = None

    def settle(self) -> None:
        """After news: put back the receives that were consumed, and tell a credit that had to wait."""
        if self._consumed:
            self._pair.post_receives(self._consumed)
            self._consumed = 0
        self._tell_credit()

    def close(self) -> None:
        self._pair.close()

    def _tell_credit(self) -> None:
        total = self._slots.credit_due()
        if total is None or not self._queue.room or self.departed:
            return
        request, signalled = self._queue.post()
        self._signal.post(0, pack_immediate(CREDIT, total), request, signalled)
        self._slots.credit_told(total)

    def _control(self, kind: int) -> None:
        self._signal.post(0, pack_immediate(kind, 0), self._queue.post(signal=True)[0], True)
