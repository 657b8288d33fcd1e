"""The `verbs` transport: RDMA writes with immediate over reliable connections, one link a peer.

One device, one completion queue and one piece of registered memory serve all links of a rank. All calls are made by
one thread; none of them blocks but `open_verbs` and `close`, which have time limits. Who waits, waits for `fileno()`.
"""

import ctypes
import errno
import mmap
import os
import select
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Self

import torch.distributed as dist
from torch._C._distributed_c10d import Store

from fs_comm.errors import CommError, CommTimeout, PeerLost
from fs_comm.transports.verbs_binding import (
    RECEIVE,
    STATUS_TEXT,
    BindingName,
    Completion,
    Device,
    NoBinding,
    QueuePair,
    Region,
    keep_mappings_from_children,
    load_binding,
    make_fork_safe,
    rdma_descriptors,
)
from fs_comm.transports.verbs_endpoint import Endpoint, path_between, slot_plan
from fs_comm.transports.verbs_gid import INDEX_VARIABLE, GidEntry, choose_gid, read_gid_table, wanted_gid_index
from fs_comm.transports.verbs_link import VerbsLink, queue_depths
from fs_comm.transports.verbs_ports import RdmaPort, choose_port, list_ports, wanted_port


@dataclass(frozen=True, kw_only=True)
class VerbsConfig:
    """How a rank uses RDMA; the same on all ranks but for `device`, `gid_index` and `binding`."""

    device: str | None = None
    """The port, "mlx5_0" or "mlx5_0:1"; by default the usable ports are dealt out by local rank."""
    gid_index: int | None = None
    """Row of the port's GID table; by default the best one (see verbs_gid)."""
    binding: BindingName | None = None
    """The Python binding; by default `ibverbs` where installed, else `pyverbs`."""
    slots: int = 8
    """Messages in flight in each direction of a link. More hide a slow receiver, and hold more memory."""
    slot_bytes: int = 1 << 20
    """Bytes of a message. Larger cost less Python time a byte, and hold more memory."""
    staging_bytes: int = 512 << 20
    """Most registered memory of this rank; with many peers, slots become smaller and fewer."""
    ack_timeout: int = 17
    """The adapter waits 4.096 µs · 2**this for an acknowledgement: 0.54 s, before each of its retries. Longer survives
    a slow switch, and notices a dead peer later."""
    retries: int = 6
    """Times that the adapter tries again; not 7, which software RoCE takes for ever."""
    heartbeat_s: float = 1.0
    """Seconds between two tests that an idle peer is alive."""
    lost_after_s: float = 30.0
    """A peer whose adapter leaves such a test unanswered this long is lost, even if ours does not say so."""

    def __post_init__(self) -> None:
        if self.slots < 2:
            raise ValueError(f"slots must be at least 2, got {self.slots}")
        if self.slot_bytes < 4096 or self.slot_bytes & (self.slot_bytes - 1):
            raise ValueError(f"slot_bytes must be a power of two of at least 4096, got {self.slot_bytes}")
        if not 1 <= self.ack_timeout <= 31:
            raise ValueError(f"ack_timeout must be in 1..31 (0 would wait for ever), got {self.ack_timeout}")
        if not 0 <= self.retries <= 6:
            raise ValueError(f"retries must be in 0..6 (7 is for ever to software RoCE), got {self.retries}")
        if not 0 < self.heartbeat_s < self.lost_after_s:
            raise ValueError(
                f"heartbeat_s must be above 0 and below lost_after_s, got {self.heartbeat_s} and {self.lost_after_s}"
            )

    @classmethod
    def from_environ(cls, environ: Mapping[str, str] = os.environ) -> Self:
        """The defaults, with the port and GID that `FS_COMM_VERBS_DEVICE` and `FS_COMM_VERBS_GID_INDEX` name."""
        return cls(device=wanted_port(environ), gid_index=wanted_gid_index(environ))


@dataclass(frozen=True)
class Availability:
    """Whether this rank can use the transport; `reason` says why not, or what it would use."""

    ok: bool
    reason: str


def probe_verbs(config: VerbsConfig | None = None, *, local_rank: int = 0) -> Availability:
    """Looks without opening a device; raises nothing that a machine's state can cause."""
    config = config or VerbsConfig.from_environ()
    ports = list_ports()
    if not ports:
        return Availability(False, "the kernel lists no RDMA device in /sys/class/infiniband")
    try:
        port, gid = _choose(config, ports, local_rank)
        binding = load_binding(config.binding)
    except (ValueError, NoBinding) as error:
        return Availability(False, str(error))
    return Availability(True, f"{port}, GID {gid}, by {binding.name}")


_GID_HINT = f" (is each end's row of its GID table the one to use? {INDEX_VARIABLE} chooses another)"

_open: "weakref.WeakSet[VerbsTransport]" = weakref.WeakSet()


class VerbsTransport:
    """The links of one rank. `progress` must be called when `fileno()` is readable, and each `heartbeat_s`.

    Attributes:
        links: by the peer's rank.
        staging: all slots of all links in one piece, page-aligned; what CUDA needs registered to copy by its engines.
    """

    name = "verbs"

    def __init__(
        self, device: Device, links: Mapping[int, VerbsLink], staging: memoryview, *, config: VerbsConfig
    ) -> None:
        self.links = links
        self.staging = staging
        self._device = device
        self._by_pair = {link.queue_pair: link for link in links.values()}
        self._config = config
        self._next_beat = time.monotonic() + config.heartbeat_s
        self._poller = select.poll()
        self._poller.register(device.fd, select.POLLIN)
        self._armed = False
        self._failure: CommError | None = None
        self._closed = False
        _open.add(self)

    def fileno(self) -> int:
        """Readable when `progress` has something to do."""
        return self._device.fd

    def progress(self) -> None:
        """Take the news: messages, credits, acknowledgements; test idle peers when it is time. Does not block.

        Raises:
            PeerLost: a peer that had not parted no longer answers, and at every later call.
            CommError: the link's protocol was broken, or the transport is closed.
        """
        if self._closed:
            raise CommError("the verbs transport is closed")
        if self._failure is not None:
            raise self._failure
        try:
            self._take_news()
            if time.monotonic() >= self._next_beat:
                self._beat()
        except CommError as error:
            self._failure = error
            raise
        except Exception as error:  # the bindings' errors share no base
            self._failure = CommError(f"the verbs transport has failed: {error}")
            raise self._failure from error

    def wait(self, timeout_s: float) -> None:
        """Sleep until `progress` has something to do, the next heartbeat, or the time is up."""
        until_beat = self._next_beat - time.monotonic()
        self._poller.poll(max(0.0, min(timeout_s, until_beat)) * 1000)

    def close(self, timeout_s: float = 1.0) -> None:
        """Part from the peers, let what was sent arrive (within the time), free everything. May be called again."""
        if self._closed:
            return
        deadline = time.monotonic() + timeout_s
        try:
            if self._failure is None:
                for link in self.links.values():
                    link.part()
                while not all(link.idle or link.departed for link in self.links.values()):
                    if time.monotonic() > deadline:
                        break
                    self.wait(deadline - time.monotonic())
                    self._take_news()
        except CommError:
            pass  # a peer went first; there is nothing left to tell it
        finally:
            self._closed = True
            for link in self.links.values():
                link.close()
            self._device.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _take_news(self) -> None:
        while self._poller.poll(0):
            self._device.take_event()
            self._armed = False
        if not self._armed:
            self._device.arm()  # before polling: what completes after the last poll then raises an event
            self._armed = True
        while found := self._device.poll():
            touched: set[VerbsLink] = set()
            for completion in found:
                link = self._by_pair.get(completion.queue_pair)
                if link is not None and self._take(link, completion):
                    touched.add(link)
            for link in touched:
                link.settle()

    def _beat(self) -> None:
        now = time.monotonic()
        self._next_beat = now + self._config.heartbeat_s
        for link in self.links.values():
            if link.departed:
                continue
            if link.unanswered_s(now) > self._config.lost_after_s:
                raise _lost(link, f"no acknowledgement for {self._config.lost_after_s} s")
            link.ping(now)

    def _take(self, link: VerbsLink, completion: Completion) -> bool:
        """Hand a completion to its link; False when the link is over and there is nothing to settle."""
        if completion.status:
            if link.departed:
                return False
            raise _lost(link, STATUS_TEXT.get(completion.status, f"completion status {completion.status}"))
        if not completion.request & RECEIVE:
            link.on_sent(completion.request)
            return True
        try:
            link.on_message(completion.immediate, completion.num_bytes)
        except ValueError as error:
            raise CommError(f"verbs link to {link.name} ({link.mine} to {link.peers}): {error}") from error
        return True


def open_verbs(
    store: Store,
    rank: int,
    peers: Sequence[int],
    *,
    config: VerbsConfig | None = None,
    local_rank: int = 0,
    timeout_s: float = 60.0,
    name_of: Callable[[int], str] = "rank {}".format,
) -> VerbsTransport:
    """Connect this rank to its peers; all of them must call this, with each other among their peers.

    Args:
        store: of the group and of this group alone; addresses are exchanged through it.
        rank: this rank in the group.
        peers: the other ranks to reach, at least one.
        config: see `VerbsConfig`; by default from the environment.
        local_rank: of this rank on its host; deals out the ports where the configuration names none.
        timeout_s: for the whole of it, greeting of the peers included.
        name_of: a rank of the group as messages call it.

    Raises:
        CommError: no device, port, GID or binding; not enough lockable memory; or a peer has reported such a thing.
        PeerLost: a peer does not answer at the address that it gave: mostly a wrong GID.
        CommTimeout: a peer did not come.
    """
    if not peers or rank in peers:
        raise ValueError(f"peers must be other ranks than {rank}, at least one, got {list(peers)}")
    deadline = time.monotonic() + timeout_s
    board = _Board(store, rank, deadline, name_of)
    config = config or VerbsConfig.from_environ()
    try:
        half = _HalfOpen(config, list(peers), local_rank, name_of)
    except (OSError, ValueError, NoBinding) as error:
        board.report(peers, str(error))
        raise CommError(f"{name_of(rank)} cannot use verbs: {error}") from error
    try:
        for peer in peers:
            board.publish(peer, half.endpoints[peer].to_json())
        transport = half.connect({peer: board.endpoint(peer) for peer in peers})
    except BaseException as error:
        half.close()
        if isinstance(error, (OSError, ValueError)):
            board.report(peers, str(error))
            raise CommError(f"{name_of(rank)} cannot connect by verbs: {error}") from error
        raise
    try:
        board.all_connected(peers)
        _greet(transport, name_of(rank), deadline, timeout_s)
    except BaseException:
        transport.close(0.0)
        raise
    return transport


class _HalfOpen:
    """Device, memory and queue pairs, before the peers' addresses are known."""

    def __init__(self, config: VerbsConfig, peers: list[int], local_rank: int, name_of: Callable[[int], str]) -> None:
        self._config, self._name_of = config, name_of
        self._port, gid = _choose(config, list_ports(), local_rank)
        binding = load_binding(config.binding)
        make_fork_safe()
        depths = queue_depths(config.slots)
        try:
            self._device = binding.open(self._port.device, num_completions=len(peers) * sum(depths))
        except Exception as error:  # pyverbs' errors share no base with the others
            raise OSError(f"{binding.name} cannot open {self._port.device}: {error}") from error
        self._pairs: dict[int, QueuePair] = {}
        try:
            info = self._device.port(self._port.number)
            self._slots, self._slot_bytes = slot_plan(
                len(peers),
                budget_bytes=config.staging_bytes,
                max_message_bytes=info.max_message_bytes,
                slots=config.slots,
                slot_bytes=config.slot_bytes,
            )
            self._direction_bytes = self._slots * self._slot_bytes
            self._memory = mmap.mmap(-1, 2 * len(peers) * self._direction_bytes)
            self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
            self._region = self._register()
            self.endpoints: dict[int, Endpoint] = {}
            for i, peer in enumerate(peers):
                self._pairs[peer] = self._device.create_queue_pair(max_sends=depths[0], max_receives=depths[1])
                self.endpoints[peer] = Endpoint(
                    port=str(self._port),
                    gid=str(gid.address),
                    gid_index=gid.index,
                    gid_kind=gid.kind,
                    link_layer=self._port.link_layer,
                    lid=info.lid,
                    mtu=info.mtu,
                    queue_pair=self._pairs[peer].number,
                    packet_number=int.from_bytes(os.urandom(3)),  # a new one keeps an earlier pair's packets out
                    address=self._address + 2 * i * self._direction_bytes,
                    key=self._region.remote_key,
                    slots=self._slots,
                    slot_bytes=self._slot_bytes,
                )
            keep_mappings_from_children()
        except Exception as error:
            self.close()
            raise error if isinstance(error, (OSError, ValueError)) else OSError(str(error)) from error

    def connect(self, peers: Mapping[int, Endpoint]) -> VerbsTransport:
        """Bring every queue pair up, with receives posted; nothing was sent yet."""
        links: dict[int, VerbsLink] = {}
        view = memoryview(self._memory)
        for peer, theirs in peers.items():
            mine = self.endpoints[peer]
            path = path_between(
                mine,
                theirs,
                port=self._port.number,
                ack_timeout=self._config.ack_timeout,
                retries=self._config.retries,
            )
            try:
                self._pairs[peer].connect(path)
            except Exception as error:
                raise OSError(
                    f"no connection from {mine} to {self._name_of(peer)} at {theirs}: {error}{_GID_HINT}"
                ) from error
            start = mine.address - self._address
            middle, end = start + self._direction_bytes, start + 2 * self._direction_bytes
            links[peer] = VerbsLink(
                peer,
                self._pairs[peer],
                mine,
                theirs,
                region=self._region,
                incoming=view[start:middle],
                outgoing=view[middle:end],
                outgoing_address=self._address + middle,
                name=self._name_of(peer),
            )
            links[peer].prepare()
        return VerbsTransport(self._device, links, view, config=self._config)

    def close(self) -> None:
        for pair in self._pairs.values():
            pair.close()
        self._device.close()

    def _register(self) -> Region:
        try:
            return self._device.register(self._address, len(self._memory))
        except Exception as error:
            raise OSError(
                errno.ENOMEM,
                f"cannot register {len(self._memory)} bytes with {self._port}: {error}; "
                "raise the limit of locked memory (ulimit -l) or lower staging_bytes",
            ) from error


class _Board:
    """Where ranks leave notes for each other while they connect: the group's store."""

    def __init__(self, store: Store, rank: int, deadline: float, name_of: Callable[[int], str]) -> None:
        self._store, self._rank, self._deadline, self._name_of = store, rank, deadline, name_of

    def publish(self, peer: int, endpoint: str) -> None:
        self._store.set(f"verbs/{self._rank}/{peer}", "+" + endpoint)

    def report(self, peers: Sequence[int], error: str) -> None:
        """Leave the error where an endpoint or the sign of being connected is waited for."""
        for peer in peers:
            self._store.set(f"verbs/{self._rank}/{peer}", "-" + error)
        self._store.set(f"verbs/connected/{self._rank}", "-" + error)

    def endpoint(self, peer: int) -> Endpoint:
        return Endpoint.from_json(self._read(f"verbs/{peer}/{self._rank}", peer, "its address"))

    def all_connected(self, peers: Sequence[int]) -> None:
        """Returns when all peers are connected; before that they would not hear a greeting."""
        self._store.set(f"verbs/connected/{self._rank}", "+")
        for peer in peers:
            self._read(f"verbs/connected/{peer}", peer, "its sign of being connected")

    def _read(self, key: str, peer: int, what: str) -> str:
        left_s = max(0.001, self._deadline - time.monotonic())
        try:
            self._store.wait([key], timedelta(seconds=left_s))
        except (dist.DistStoreError, RuntimeError) as error:
            raise CommTimeout(
                f"{self._name_of(self._rank)} opening verbs: {self._name_of(peer)} did not give {what} in time"
            ) from error
        text = self._store.get(key).decode()
        if text[0] == "-":
            raise CommError(f"{self._name_of(peer)} cannot use verbs: {text[1:]}")
        return text[1:]


def _choose(config: VerbsConfig, ports: Sequence[RdmaPort], local_rank: int) -> tuple[RdmaPort, GidEntry]:
    port = choose_port(ports, local_rank=local_rank, wanted=config.device)
    return port, choose_gid(read_gid_table(port), link_layer=port.link_layer, index=config.gid_index)


def _greet(transport: VerbsTransport, me: str, deadline: float, timeout_s: float) -> None:
    """Prove each link in both directions before it carries anything."""
    for link in transport.links.values():
        link.greet()
    while silent := [link for link in transport.links.values() if not link.acquainted]:
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            who = "; ".join(f"{link.name} at {link.peers} from {link.mine}" for link in silent)
            raise CommTimeout(f"{me} opening verbs: no greeting within {timeout_s} s from {who}")
        transport.wait(left_s)
        transport.progress()
    for link in transport.links.values():
        link.proven = True


def _lost(link: VerbsLink, why: str) -> PeerLost:
    hint = ""
    if why.startswith("no acknowledgement"):
        hint = ": its process is gone, the network is down, or the address is wrong"
    if not link.proven:
        hint += _GID_HINT
    return PeerLost(f"{link.name} lost on verbs, {link.mine} to {link.peers}: {why}{hint}")


def _after_fork() -> None:
    """In a forked child, let go of the devices.

    Held open by the child, the queue pairs would go on answering after the parent's death, and destructors in the child
    would take down those of a living parent. The descriptors' numbers stay taken, since the objects close them.
    """
    if not _open:
        return
    nothing = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    for fd in rdma_descriptors():
        os.dup2(nothing, fd, inheritable=False)
    os.close(nothing)
    _open.clear()


os.register_at_fork(after_in_child=_after_fork)
