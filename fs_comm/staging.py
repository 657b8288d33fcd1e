"""Staging memory that the ranks of one host share: slots that bytes pass through, and words that say how far they are.

Each rank owns a region (memfd: gone with the last process that maps it, and with no need for room in /dev/shm), which
all ranks map. Words are counters of 32 bits that wrap around, or a state; each has one writer, on a cache line of its
own. A rank also leaves a *view* of every operation for every peer in a ring: what the operation is, as it sees it.
"""

import ctypes
import mmap
import os
import socket
import struct
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from fs_comm.errors import CommError
from fs_comm.wire import DTYPE_NAME, Op

RING = 256
"""Operations that may be under way at once."""

ALIVE, FAILED, LEFT = 0, 1, 2
WORD = 0xFFFFFFFF

_LINE = 64
_PAGE = 4096
_TEXT_BYTES = 2048


@dataclass(frozen=True, slots=True)
class View:
    """One operation as one rank sees it, told to one peer."""

    sequence: int
    """Modulo 2³²."""
    op: int
    dtype: int
    num_bytes: int
    """What the rank has for the peer."""
    expected: int
    """What the rank thinks that the peer has for it."""

    FORMAT: ClassVar = struct.Struct("<IHHqq")

    def pack(self) -> bytes:
        return self.FORMAT.pack(self.sequence, self.op, self.dtype, self.num_bytes, self.expected)

    def __str__(self) -> str:
        name = Op(self.op).name.lower() if self.op in Op._value2member_map_ else f"operation {self.op}"
        return f"{name} of {DTYPE_NAME.get(self.dtype, 'an unknown dtype')} (number {self.sequence})"

    def signature(self) -> int:
        """Of all that the peer must see alike, in 32 bits, not 0."""
        return zlib.crc32(self.pack()) or 1

    def signature_of_peer(self) -> int:
        """The signature that the peer's view must have to fit this one."""
        return View(self.sequence, self.op, self.dtype, self.expected, self.num_bytes).signature()


@dataclass(frozen=True)
class Layout:
    """Where things lie in a rank's region, in bytes from its start.

    Words of the owner: `state`, `done` (operations that have ended), `ready` (chunks put, by lane), and written by the
    readers `taken` (chunks taken, by lane and reader).
    """

    size: int
    slot_bytes: int
    num_slots: int

    state: ClassVar = 0
    done: ClassVar = _LINE
    scratch: ClassVar = 2 * _LINE
    """Means nothing."""

    def ready(self, lane: int) -> int:
        return (3 + lane) * _LINE

    def taken(self, lane: int, reader: int) -> int:
        """A lane to one rank has one reader, the lane to all has all."""
        return (4 + self.size + (lane if lane < self.size else self.size + reader)) * _LINE

    @property
    def text(self) -> int:
        """Why the owner failed: four bytes of length, then UTF-8."""
        return (4 + 3 * self.size) * _LINE

    def signature(self, peer: int, sequence: int) -> int:
        """The word that says that the owner takes part in an operation as it told the peer."""
        return self.text + _TEXT_BYTES + 4 * (peer * RING + sequence % RING)

    def view(self, peer: int, sequence: int) -> int:
        return self.text + _TEXT_BYTES + 4 * self.size * RING + View.FORMAT.size * (peer * RING + sequence % RING)

    def slot(self, lane: int, slot: int) -> int:
        head = -(-self.view(self.size, 0) // _PAGE) * _PAGE
        return head + (lane * self.num_slots + slot) * self.slot_bytes

    @property
    def num_bytes(self) -> int:
        return self.slot(self.size + 1, 0)


class Region:
    """A rank's region, as this process maps it."""

    def __init__(self, layout: Layout, fd: int) -> None:
        self.layout = layout
        self._map = mmap.mmap(fd, layout.num_bytes)
        self._bytes = (ctypes.c_char * layout.num_bytes).from_buffer(self._map)
        self._words = memoryview(self._map)[: layout.slot(0, 0)].cast("I")
        self.address = ctypes.addressof(self._bytes)
        self.device_address = 0
        """Where the device sees it, once it is registered."""

    def word(self, offset: int) -> int:
        return self._words[offset // 4]

    def set_word(self, offset: int, value: int) -> None:
        self._words[offset // 4] = value & WORD

    def reached(self, offset: int, count: int) -> bool:
        """Whether a counter has come as far as `count`, as the device compares."""
        return (self.word(offset) - count) & WORD < 1 << 31

    def publish(self, peer: int, view: View) -> None:
        """The signature comes last: whoever sees it may read the view."""
        at = self.layout.view(peer, view.sequence)
        self._map[at : at + View.FORMAT.size] = view.pack()
        self.set_word(self.layout.signature(peer, view.sequence), view.signature())

    def view(self, peer: int, sequence: int) -> View | None:
        """What the owner told `peer` about an operation; None before it did."""
        at = self.layout.view(peer, sequence)
        view = View(*View.FORMAT.unpack(self._map[at : at + View.FORMAT.size]))
        is_whole = self.word(self.layout.signature(peer, sequence)) == view.signature()
        return view if is_whole and view.sequence == sequence & WORD else None

    def fail(self, text: str) -> None:
        data = text.encode()[: _TEXT_BYTES - 4]
        at = self.layout.text
        self._map[at : at + 4 + len(data)] = len(data).to_bytes(4, "little") + data
        self.set_word(self.layout.state, FAILED)

    def failure(self) -> str:
        at = self.layout.text
        length = int.from_bytes(self._map[at : at + 4], "little")
        return bytes(self._map[at + 4 : at + 4 + length]).decode(errors="replace")

    def close(self) -> None:
        self._words.release()
        del self._bytes
        self._map.close()


def share(layout: Layout, rank: int, sockets: Mapping[int, socket.socket], timeout_s: float) -> list[Region]:
    """All ranks' regions, in rank order. Every rank calls, with a Unix socket to each other rank."""
    own = os.memfd_create("fs_comm-staging", os.MFD_CLOEXEC)
    regions: dict[int, Region] = {}
    try:
        os.ftruncate(own, layout.num_bytes)
        regions[rank] = Region(layout, own)
        for s in sockets.values():
            s.settimeout(timeout_s)
            socket.send_fds(s, [b"s"], [own])
    finally:
        os.close(own)
    for peer, s in sockets.items():
        _, fds, _, _ = socket.recv_fds(s, 1, 1)
        if not fds:
            raise CommError(f"rank {peer} of the group sent no staging memory")
        try:
            regions[peer] = Region(layout, fds[0])
        finally:
            os.close(fds[0])
    return [regions[r] for r in range(layout.size)]
