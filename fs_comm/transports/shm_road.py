"""How large parts of exchanges move between processes of one host: read in place, or by way of shared memory."""

from collections.abc import Sequence
from dataclasses import dataclass

from fs_comm.errors import CommError
from fs_comm.exchange import Turn
from fs_comm.transports.memory import NUM_SLOTS, SLOT_BYTES, Staging, copy, read_from
from fs_comm.wire import Kind

_PIECE_BYTES = 32 << 20
"""Between two of these other roads go on; the kernel does not stop in the middle of one, whatever happens."""


class AttachRoad:
    """Each rank reads its parts out of the owners' memory, and says when it has."""

    def begin(self, turn: Turn, sends: Sequence[int], receives: Sequence[int]) -> None:
        self._turn, self._sends, self._receives = turn, sends, receives

    def complete(self) -> None:
        turn = self._turn
        for peer in self._receives:
            pid, address, out = turn.mesh.pids[peer], turn.headers[peer].address, turn.exchange.receive[peer]
            for start in range(0, len(out), _PIECE_BYTES):
                try:
                    read_from(pid, address + start, out[start : start + _PIECE_BYTES])
                finally:
                    # If the owner has given up, its memory may have changed before it was read; if its process has
                    # ended, the number may be another's by now. Either has been said, or can be seen, before it could.
                    turn.mesh.check([peer])
                turn.between()
            turn.tell(peer, Kind.DONE)
        turn.collect(Kind.DONE, self._sends)
        del self._turn

    def advance(self) -> None:
        """Reading does not go on by itself."""

    def break_off(self) -> None:
        """The mesh is closed, which is what `complete` looks at."""

    def close(self) -> None:
        """Holds nothing."""


@dataclass(slots=True)
class _Lane:
    """One direction of a pair's traffic within an exchange, in slots."""

    num_slots: int
    """To be filled in all."""
    moved: int = 0
    """Filled by this rank, or emptied."""
    told: int = 0
    """By the peer: emptied, or filled."""


class StagedRoad:
    """The owner copies its part into shared memory slot by slot, the other out of it."""

    def __init__(self, staging: Staging) -> None:
        self._staging = staging

    def begin(self, turn: Turn, sends: Sequence[int], receives: Sequence[int]) -> None:
        self._turn = turn
        self._out = {p: _Lane(-(-len(turn.exchange.send[p]) // SLOT_BYTES)) for p in sends}
        self._in = {p: _Lane(-(-len(turn.exchange.receive[p]) // SLOT_BYTES)) for p in receives}

    def complete(self) -> None:
        while peers := self._unfinished():
            moved = False
            for peer in peers:
                self._listen(peer)
                moved |= self._fill_one(peer)
                moved |= self._empty_one(peer)
            if moved:
                self._turn.between()
            elif still := self._unfinished():  # the last thing to do may have been to listen
                self._turn.wait(still)
        del self._turn

    def advance(self) -> None:
        """Nothing goes on by itself."""

    def break_off(self) -> None:
        """The mesh is closed, which is what `complete` looks at."""

    def close(self) -> None:
        self._staging.close()

    def _unfinished(self) -> list[int]:
        """A sender is done when its slots are free again: the next exchange begins with all of them."""
        out = {p for p, lane in self._out.items() if lane.told < lane.num_slots}
        return sorted(out | {p for p, lane in self._in.items() if lane.moved < lane.num_slots})

    def _fill_one(self, peer: int) -> bool:
        lane = self._out.get(peer)
        if lane is None or lane.moved == lane.num_slots or lane.moved - lane.told == NUM_SLOTS:
            return False
        part = self._turn.exchange.send[peer][lane.moved * SLOT_BYTES :][:SLOT_BYTES]
        copy(self._staging.outgoing[peer][lane.moved % NUM_SLOTS, : len(part)], part)
        lane.moved += 1
        self._turn.tell(peer, Kind.FILLED)
        return True

    def _empty_one(self, peer: int) -> bool:
        lane = self._in.get(peer)
        if lane is None or lane.moved == lane.told:
            return False
        part = self._turn.exchange.receive[peer][lane.moved * SLOT_BYTES :][:SLOT_BYTES]
        copy(part, self._staging.incoming[peer][lane.moved % NUM_SLOTS, : len(part)])
        lane.moved += 1
        self._turn.tell(peer, Kind.DONE)
        return True

    def _listen(self, peer: int) -> None:
        self._turn.mesh.read()
        while peer in self._unfinished() and (message := self._turn.mesh.take(peer)) is not None:
            self._turn.must_be((Kind.FILLED, Kind.DONE), peer, message)
            lane = (self._in if message[0].kind == Kind.FILLED else self._out).get(peer)
            if lane is None or lane.told == lane.num_slots:
                raise CommError(f"{self._turn.mesh.name_of(peer)} counts other slots than this rank")
            lane.told += 1
