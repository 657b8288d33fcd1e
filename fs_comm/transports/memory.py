"""Bytes between processes of one host.

Two roads. *Attach*: the receiver copies straight out of the sender's memory (`process_vm_readv`), one copy in all; the
kernel allows it to processes that may trace each other. *Staged*: the sender copies into shared memory (memfd, so that
it is gone with the last process and needs no room in /dev/shm), the receiver out of it.
"""

import ctypes
import mmap
import os
import socket
from collections.abc import Mapping

import torch
from torch import Tensor

from fs_comm.errors import CommError

SLOT_BYTES, NUM_SLOTS = 512 << 10, 8
"""Of staged data on its way from one rank to another. Small enough for a processor's cache to hold them all."""

_SMALL_BYTES = 128 << 10
"""Copied without giving the interpreter away: beside a busy main thread, getting it back takes 5 ms."""

_libc = ctypes.CDLL(None, use_errno=True)
_libc_held = ctypes.PyDLL(None, use_errno=True)
_libc_held.memmove.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
_PR_SET_PTRACER, _PR_SET_PTRACER_ANY = 0x59616D61, ctypes.c_ulong(-1)


class _Span(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


def allow_attach() -> None:
    """Lets other processes of this user read this one's memory, where Yama would ask for it; nothing elsewhere."""
    _libc.prctl(_PR_SET_PTRACER, _PR_SET_PTRACER_ANY, 0, 0, 0)


def copy(out: Tensor, source: Tensor) -> None:
    """`(n,)` uint8 each, contiguous, on the CPU; large ones release the GIL meanwhile."""
    if len(source) > _SMALL_BYTES:
        out.copy_(source)
    elif len(source):
        _libc_held.memmove(out.data_ptr(), source.data_ptr(), len(source))


def read_from(pid: int, address: int, out: Tensor) -> None:
    """Fills `out` `(n,)` uint8, contiguous, from the other process's memory; if large, releases the GIL meanwhile.

    Raises:
        PermissionError: The kernel does not let this process read that one.
        CommError: The memory is not there any more.
    """
    libc = _libc if out.numel() > _SMALL_BYTES else _libc_held
    done = 0
    while done < out.numel():
        mine = _Span(out.data_ptr() + done, out.numel() - done)
        theirs = _Span(address + done, out.numel() - done)
        n = libc.process_vm_readv(pid, ctypes.byref(mine), 1, ctypes.byref(theirs), 1, 0)
        if n <= 0:
            code = ctypes.get_errno()
            if code in (1, 38):  # EPERM, ENOSYS
                raise PermissionError(code, os.strerror(code))
            raise CommError(f"could not read {out.numel()} bytes of process {pid}: {os.strerror(code)}")
        done += n


class Staging:
    """Shared memory of one group: slots to write into for each peer, and the peers' slots for this rank.

    Args:
        sockets: A Unix socket to each peer, for the exchange of file descriptors.
    """

    def __init__(self, rank: int, size: int, sockets: Mapping[int, socket.socket], timeout_s: float) -> None:
        num_bytes = size * NUM_SLOTS * SLOT_BYTES
        own = os.memfd_create("fs_comm", os.MFD_CLOEXEC)
        os.ftruncate(own, num_bytes)
        self._maps = {rank: mmap.mmap(own, num_bytes)}
        for s in sockets.values():
            s.settimeout(timeout_s)
            socket.send_fds(s, [b"m"], [own])
        os.close(own)
        for peer, s in sockets.items():
            _, fds, _, _ = socket.recv_fds(s, 1, 1)
            if not fds:
                raise CommError(f"rank {peer} of the group sent no shared memory")
            self._maps[peer] = mmap.mmap(fds[0], num_bytes)
            os.close(fds[0])
        self.outgoing = {p: self._slots(rank, p) for p in sockets}
        """`(NUM_SLOTS, SLOT_BYTES)` uint8 for each peer: written here, read there."""
        self.incoming = {p: self._slots(p, rank) for p in sockets}

    def _slots(self, owner: int, reader: int) -> Tensor:
        return torch.frombuffer(self._maps[owner], dtype=torch.uint8).view(-1, NUM_SLOTS, SLOT_BYTES)[reader]

    def close(self) -> None:
        self.outgoing.clear()
        self.incoming.clear()
        for m in self._maps.values():
            try:
                m.close()
            except BufferError:
                pass  # a tensor still looks into it: unmapped with that
        self._maps.clear()
