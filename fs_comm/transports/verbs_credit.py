"""Accounts that keep a link from overrunning its peer or its own queue, without a device in sight.

A link has S slots in each direction. The sender may fill a slot when it holds a credit; the receiver gives the credit
back when it has emptied the slot. Slots are used in turn, so a message's number says its slot, and a credit message
carries how many slots were emptied *in all*: a later one makes up for one that was held back.

    data in flight ≤ S, credit messages in flight ≤ S, greeting and farewell 2  ⇒  2S + 2 posted receives suffice,

so the adapter never finds a receiver not ready, which it would punish with back-off.
"""

NUMBER_BITS = 30
NUMBER_MASK = (1 << NUMBER_BITS) - 1

# What an immediate says, in its two upper bits.
DATA, CREDIT, HELLO, BYE = range(4)


def pack_immediate(kind: int, number: int) -> int:
    """The 32 bits that travel with a write: what it is, and its number modulo 2**30."""
    return kind << NUMBER_BITS | number & NUMBER_MASK


def unpack_immediate(immediate: int) -> tuple[int, int]:
    """(kind, number modulo 2**30)."""
    return immediate >> NUMBER_BITS, immediate & NUMBER_MASK


class SendCredits:
    """The sender's side: which slot may be filled next."""

    def __init__(self, slots: int) -> None:
        self.slots = slots
        self._taken = 0
        self._returned = 0

    @property
    def available(self) -> int:
        return self.slots - (self._taken - self._returned)

    def take(self) -> int | None:
        """The number of the next message, or None when the peer has room for no more. Its slot is number % slots."""
        if not self.available:
            return None
        self._taken += 1
        return self._taken - 1

    def peer_has_released(self, total: int) -> None:
        """Note a credit message; `total` is the peer's running count modulo 2**30."""
        fresh = (total - self._returned) & NUMBER_MASK
        if fresh > self._taken - self._returned:
            raise ValueError(
                f"peer released {fresh} slots where {self._taken - self._returned} are in use: the link is corrupt"
            )
        self._returned += fresh


class ReceiveSlots:
    """The receiver's side: what has landed, what was emptied, and when to say so."""

    def __init__(self, slots: int) -> None:
        self.slots = slots
        # Telling of several slots at once halves the small messages; never so many that the sender could run dry.
        self._batch = max(1, slots // 4)
        self._sizes: list[int] = [0] * slots
        self._landed = 0
        self._read = 0
        self._released = 0
        self._told = 0

    def land(self, number: int, num_bytes: int) -> None:
        """A data message has come; `number` is its count modulo 2**30."""
        if number != self._landed & NUMBER_MASK:
            raise ValueError(f"message {self._landed & NUMBER_MASK} is next, got {number}: the link is corrupt")
        if self._landed - self._released >= self.slots:
            raise ValueError(f"peer sent message {number} without a credit: the link is corrupt")
        self._sizes[self._landed % self.slots] = num_bytes
        self._landed += 1

    def read(self) -> tuple[int, int] | None:
        """(slot, bytes) of the oldest message not read yet, or None."""
        if self._read == self._landed:
            return None
        slot = self._read % self.slots
        self._read += 1
        return slot, self._sizes[slot]

    def release(self) -> None:
        """The oldest message that was read and not released may be overwritten."""
        if self._released == self._read:
            raise ValueError("release() needs a message that was read before and not released yet, there is none")
        self._released += 1

    def credit_due(self) -> int | None:
        """The running count to tell the peer now, or None while it can wait."""
        return self._released if self._released - self._told >= self._batch else None

    def credit_told(self, total: int) -> None:
        self._told = total


class SendQueue:
    """How full the send queue is. Only a signalled request is completed visibly, and with it all before it."""

    def __init__(self, depth: int) -> None:
        self.depth = depth
        self._every = max(1, depth // 4)
        self._posted = 0
        self._done = 0
        self._signalled = 0

    @property
    def room(self) -> int:
        return self.depth - (self._posted - self._done)

    @property
    def idle(self) -> bool:
        """Nothing is known to be outstanding."""
        return self._posted == self._done

    def post(self, *, signal: bool = False) -> tuple[int, bool]:
        """(id of the request about to be posted, whether it must be signalled)."""
        if not self.room:
            raise ValueError(f"the send queue is full: {self.depth} requests are outstanding")
        self._posted += 1
        if signal or self._posted - self._signalled >= self._every:
            self._signalled = self._posted
            return self._posted, True
        return self._posted, False

    def complete(self, request: int) -> None:
        """The signalled request of this id is done, and all before it."""
        self._done = max(self._done, request)
