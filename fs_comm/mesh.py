"""One stream a pair of ranks, for headers, small data and signs of life.

Within a host these are Unix sockets, which also pass file descriptors; between hosts TCP with keep-alive. A process
that ends closes its sockets, so its peers learn of it at once, also while idle.
"""

import contextlib
import ctypes
import errno
import json
import os
import secrets
import select
import socket
import time
from collections import deque
from collections.abc import Callable, Collection
from datetime import timedelta

from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from fs_comm.errors import CommError, CommTimeout, GroupClosed, Mismatch, PeerLost
from fs_comm.wire import HEADER_BYTES, Header, Kind

_KEEPALIVE_S = 5

# Calls that never wait keep the interpreter: beside a busy main thread, getting it back takes 5 ms each time.
_libc = ctypes.PyDLL(None, use_errno=True)
_libc.send.restype = _libc.recv.restype = ctypes.c_ssize_t
_libc.send.argtypes = (ctypes.c_int, ctypes.c_char_p, ctypes.c_size_t, ctypes.c_int)
_libc.recv.argtypes = (ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)

_ENDED = "its process has ended"
_RELAYED = {kind.__name__: kind for kind in (PeerLost, CommTimeout, Mismatch)}
"""What a peer failed with is what those that hear of it fail with."""

Message = tuple[Header, bytes]
"""With the payload."""


class Mesh:
    """Sockets to all peers of a group. One thread uses it at a time, but for `lost`.

    Args:
        name_of: A group rank as errors call it.
    """

    def __init__(self, store: Store, rank: int, size: int, *, timeout_s: float, name_of: Callable[[int], str]) -> None:
        self.rank, self.size, self.name_of = rank, size, name_of
        self.host = _host()
        self.hosts: list[str] = []
        """Of each rank; equal where ranks share a host."""
        self.pids: list[int] = []
        self.sockets: dict[int, socket.socket] = {}
        self.departed: set[int] = set()
        self._inbox: dict[int, deque[Message]] = {p: deque() for p in range(size) if p != rank}
        self._unread: dict[int, bytearray] = {p: bytearray() for p in self._inbox}  # the beginning of a message
        self._ended: dict[int, PeerLost] = {}  # nothing more will come of them
        self._scratch = (ctypes.c_char * (64 << 10))()
        self._gone: dict[int, str] = {}  # kept after the sockets are closed
        self._is_closed = False
        self._connect(store, timeout_s)

    def _connect(self, store: Store, timeout_s: float) -> None:
        unix = socket.socket(socket.AF_UNIX)
        unix_name = f"fs_comm-{os.getpid()}-{secrets.token_hex(8)}"
        unix.bind("\0" + unix_name)
        tcp = socket.create_server(("", 0), backlog=self.size)
        unix.listen(self.size)
        address = [self.host, os.getpid(), unix_name, _reachable_address(store), tcp.getsockname()[1]]
        store.set(f"mesh{self.rank}", json.dumps(address))
        store.wait([f"mesh{r}" for r in range(self.size)], timedelta(seconds=timeout_s))
        addresses = [json.loads(store.get(f"mesh{r}")) for r in range(self.size)]
        self.hosts = [a[0] for a in addresses]
        self.pids = [a[1] for a in addresses]
        deadline = time.monotonic() + timeout_s
        try:
            for peer in range(self.rank):  # lower ranks accept, higher ones call
                host, _, name, ip, port = addresses[peer]
                if host == self.host:
                    s = socket.socket(socket.AF_UNIX)
                    s.settimeout(timeout_s)
                    s.connect("\0" + name)
                else:
                    s = socket.create_connection((ip, port), timeout=timeout_s)
                    _keep_alive(s)
                s.sendall(self.rank.to_bytes(4, "little"))
                self.sockets[peer] = s
            calls = select.poll()
            calls.register(unix, select.POLLIN)
            calls.register(tcp, select.POLLIN)
            while len(self.sockets) < self.size - 1:
                ready = calls.poll(1000 * max(0.0, deadline - time.monotonic()))
                if not ready:
                    missing = [self.name_of(r) for r in range(self.size) if r != self.rank and r not in self.sockets]
                    raise CommTimeout(f"waited {timeout_s:.0f} s for {', '.join(missing)} to connect to the new group")
                called = tcp if ready[0][0] == tcp.fileno() else unix
                s, _ = called.accept()
                s.settimeout(timeout_s)
                if called is tcp:
                    _keep_alive(s)
                self.sockets[int.from_bytes(_exactly(s, 4), "little")] = s
        except OSError as error:
            raise CommError(f"the group's ranks must reach each other: {error}") from error
        finally:
            unix.close()
            tcp.close()

    def send(self, peer: int, header: Header, payload: bytes | memoryview = b"", *, timeout_s: float) -> None:
        """All of it, or an error; small enough that a socket's buffer takes it while the peer is busy."""
        s = self.sockets[peer]
        data = header.pack() + bytes(payload)
        sent = max(0, _libc.send(s.fileno(), data, len(data), socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL))
        if sent == len(data):
            return
        s.settimeout(max(timeout_s, 0.001))
        try:
            s.sendall(data[sent:])
        except TimeoutError as error:
            raise CommTimeout(
                f"{self.name_of(peer)} did not take a message in time: it is stopped, or not calling"
            ) from error
        except OSError as error:
            self.read()  # it may have said why before it closed
            raise self._lost(peer) from error

    def take(self, peer: int) -> Message | None:
        """The peer's next message that was read already."""
        inbox = self._inbox[peer]
        return inbox.popleft() if inbox else None

    def read(self) -> None:
        """Everything that peers have sent, without waiting.

        Raises:
            CommError: One of them has given the group up.
        """
        if self._is_closed:
            raise GroupClosed("the group was closed meanwhile")
        for peer, s in self.sockets.items():
            while peer not in self._ended:
                n = _libc.recv(s.fileno(), self._scratch, len(self._scratch), socket.MSG_DONTWAIT)
                code = ctypes.get_errno()
                if n < 0 and code == errno.EINTR:
                    continue
                if n < 0 and code == errno.EAGAIN:
                    break
                if n <= 0:
                    self._gone.setdefault(peer, _why_gone(code if n < 0 else 0))
                    self._ended[peer] = self._lost(peer)
                    break
                self._unread[peer] += memoryview(self._scratch)[:n]
                self._parse(peer)
                if n < len(self._scratch):
                    break

    def wait(self, peers: Collection[int], *, timeout_s: float) -> bool:
        """Until one of `peers` has a message to take; False when the time is up first.

        Raises:
            PeerLost: One of them that has no message left is gone, or has left.
            CommError: Any peer has given the group up.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            self.read()
            if any(self._inbox[p] for p in peers):
                return True
            self._must_be_there(peers)
            poll = select.poll()
            for peer, s in self.sockets.items():
                if peer not in self._ended:
                    poll.register(s.fileno(), select.POLLIN)
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                return False
            poll.poll(left_s * 1000)

    def check(self, peers: Collection[int]) -> None:
        """Raises if one of `peers` is gone or has left, or if anyone has given the group up."""
        self.read()
        self._must_be_there(peers)

    def _must_be_there(self, peers: Collection[int]) -> None:
        for peer in peers:
            if peer in self._ended:
                raise self._ended[peer]

    def _parse(self, peer: int) -> None:
        unread = self._unread[peer]
        start = 0
        while len(unread) - start >= HEADER_BYTES:
            header = Header.unpack(bytes(unread[start : start + HEADER_BYTES]))
            stop = start + HEADER_BYTES + header.payload
            if len(unread) < stop:
                break
            payload = bytes(unread[start + HEADER_BYTES : stop])
            start = stop
            if header.kind == Kind.FAILED:
                self.departed.add(peer)  # it closes its connections, and lives
                head, _, why = payload.decode(errors="replace").partition("\n")
                kind, *lost = head.split()
                for other in set(map(int, lost)) - {self.rank}:  # this rank's own connection may not have ended yet
                    self._gone.setdefault(other, _ENDED)
                raise _RELAYED.get(kind, CommError)(f"{self.name_of(peer)} gave the group up: {why}")
            if header.kind == Kind.BYE:
                self.departed.add(peer)
                text = f"{self.name_of(peer)} has shut its group down while others still use theirs"
                self._ended[peer] = PeerLost(text)
            else:
                self._inbox[peer].append((header, payload))
        del unread[:start]

    def lost(self) -> dict[int, str]:
        """Peers whose process has ended without a goodbye, or is stopped on this host; with the reason.

        Takes nothing from the streams.
        """
        for peer, s in list(self.sockets.items()):
            if self._is_closed or peer in self.departed or peer in self._gone:
                continue
            try:
                peek = _peek(s)
            except OSError as error:
                if not self._is_closed:  # else it was this rank's thread that closed it just now
                    self._gone[peer] = _why_gone(error.errno or 0)
                continue
            if peek == b"":
                self._gone[peer] = _ENDED
            elif peek is not None and len(peek) == HEADER_BYTES and Header.unpack(peek).kind == Kind.FAILED:
                self.departed.add(peer)
        stopped = {p for p in self.sockets if self.hosts[p] == self.host and _is_stopped(self.pids[p])}
        return {p: "its process is stopped, by a signal or a debugger" for p in stopped} | self._gone

    def close(self, goodbye: Header | None, payload: bytes = b"") -> None:
        """Says why, without waiting, and closes all sockets."""
        self.lost()
        self._is_closed = True
        for s in self.sockets.values():
            if goodbye is not None:
                try:
                    s.settimeout(0.1)
                    s.sendall(goodbye.pack() + payload)
                except OSError:
                    pass  # gone before us
            with contextlib.suppress(OSError):
                s.shutdown(socket.SHUT_RDWR)  # else another thread of ours that polls would not notice
            s.close()

    def after_fork(self) -> None:
        """In a child, which must not hold the sockets open: peers would not see the parent end."""
        self._is_closed = True
        for s in self.sockets.values():
            s.close()

    def _lost(self, peer: int) -> PeerLost:
        self._gone.setdefault(peer, _ENDED)
        return PeerLost(f"{self.name_of(peer)} is lost: {self._gone[peer]}")


def _why_gone(code: int) -> str:
    """From a stream's end (0) or error; a process that ends without reading all resets its connections."""
    if code in (0, errno.ECONNRESET, errno.EPIPE):
        return _ENDED
    return f"its connection broke: {os.strerror(code)}"


def _peek(s: socket.socket) -> bytes | None:
    """The header that comes next, as far as it is there; empty at the end of the stream, None where nothing came.

    Asks first: of a socket with a time limit, Python waits for data even where the call says not to.
    """
    fd = s.fileno()
    if fd < 0:
        raise ConnectionAbortedError(errno.ECONNABORTED, "closed by this rank")
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return s.recv(HEADER_BYTES, socket.MSG_PEEK) if poll.poll(0) else None


def _exactly(s: socket.socket, num_bytes: int) -> bytes:
    data = bytearray(num_bytes)
    view = memoryview(data)
    while view:
        n = s.recv_into(view)
        if not n:
            raise ConnectionResetError("closed by the peer")
        view = view[n:]
    return bytes(data)


def _keep_alive(s: socket.socket) -> None:
    s.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    s.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option in ("TCP_KEEPIDLE", "TCP_KEEPINTVL"):
        if hasattr(socket, option):
            s.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), _KEEPALIVE_S)
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        s.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 4000 * _KEEPALIVE_S)


def _is_stopped(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as f:
            return f.read().rpartition(")")[2].split()[0] in "Tt"
    except OSError:
        return False


def _host() -> str:
    """The same for processes that share memory and Unix sockets: machine, boot, network and process namespaces.

    `FS_COMM_HOST` names it instead: processes of one machine with other names are taken for other hosts.
    """
    if name := os.environ.get("FS_COMM_HOST"):
        return name
    try:
        with open("/proc/sys/kernel/random/boot_id") as f:
            boot = f.read().strip()
        return f"{boot}-{os.stat('/proc/self/ns/net').st_ino}-{os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:
        return socket.gethostname()


def _reachable_address(store: Store) -> str:
    """Where other hosts find this one: the interface that gloo uses, else that of the master's route."""
    name = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
    if name:
        import fcntl
        import struct

        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
            packed = fcntl.ioctl(s.fileno(), 0x8915, struct.pack("256s", name.encode()[:15]))  # SIOCGIFADDR
        return socket.inet_ntoa(packed[20:24])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
        try:
            s.connect((_master(store), 9))
            return s.getsockname()[0]
        except OSError:
            return "127.0.0.1"


def _master(store: Store) -> str:
    """The host that all ranks have reached: jobs that begin by `tcp://…` have no MASTER_ADDR."""
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return store.host if isinstance(store, TCPStore) else os.environ.get("MASTER_ADDR", "127.0.0.1")
