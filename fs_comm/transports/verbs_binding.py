"""What the verbs transport asks of a Python binding to libibverbs, and which of the two bindings gives it.

Numbers of the verbs interface are part of its stable ABI, so they are written here once rather than taken from either
binding's enums. Immediate values travel in network byte order whatever the binding does by itself: ranks with
different bindings understand each other.
"""

import ctypes
import importlib
import logging
import mmap
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol, get_args

log = logging.getLogger(__name__)

BindingName = Literal["ibverbs", "pyverbs"]

QP_TYPE_RC = 2
WRITE, WRITE_WITH_IMMEDIATE = 0, 1
SIGNALLED = 1 << 1
ACCESS = 1 << 0 | 1 << 1  # local write, remote write

# Request ids of receives carry this bit: on an error a completion's opcode means nothing, its id does.
RECEIVE = 1 << 62

STATUS_TEXT = {
    1: "local length error",
    2: "local queue pair error",
    4: "local protection error",
    5: "flushed after an earlier error",
    6: "memory window error",
    7: "bad response",
    8: "local access error",
    9: "remote invalid request",
    10: "remote access error",
    11: "remote operation error",
    12: "no acknowledgement (transport retries exceeded)",
    13: "receiver not ready (retries exceeded)",
    19: "fatal error of the adapter",
    20: "response timeout",
    21: "general error",
}


class Completion(NamedTuple):
    """One finished request. Of a failed one only `request`, `status` and `queue_pair` mean anything."""

    request: int
    status: int
    queue_pair: int
    num_bytes: int
    immediate: int


class PortInfo(NamedTuple):
    lid: int
    mtu: int  # the verbs code: 1 is 256 bytes, 5 is 4096
    max_message_bytes: int


class Region(NamedTuple):
    """Registered memory: its keys for this process's requests and for the peers'."""

    local_key: int
    remote_key: int


@dataclass(frozen=True, kw_only=True)
class Path:
    """All that takes a queue pair from created to connected (see `verbs_endpoint.path_between`)."""

    port: int
    peer_queue_pair: int
    peer_packet_number: int
    packet_number: int
    peer_gid: bytes
    peer_lid: int
    gid_index: int
    routed: bool  # with a global route header: always on Ethernet
    mtu: int
    ack_timeout: int
    retries: int


# An idle receiver is never short of posted receives (see verbs_credit), so these two only bound a fault of ours.
RNR_RETRIES = 6
RNR_TIMER = 20  # 10 ms; its default of 0 would mean 655 ms
HOP_LIMIT = 64  # the bindings' default of 1 does not leave the subnet


class Write(Protocol):
    """A write request of fixed place and target, built once and posted often: building one costs microseconds."""

    def post(self, num_bytes: int, immediate: int | None, request: int, signalled: bool) -> None: ...


class QueuePair(Protocol):
    @property
    def number(self) -> int: ...
    def connect(self, path: Path) -> None: ...
    def post_receives(self, count: int) -> None: ...
    def write(self, address: int, local_key: int, peer_address: int, peer_key: int) -> Write: ...
    def close(self) -> None: ...


class Device(Protocol):
    """An open device with one completion queue and its channel. Calls never block and come from one thread."""

    @property
    def fd(self) -> int: ...
    def port(self, number: int) -> PortInfo: ...
    def max_requests(self) -> int: ...
    def register(self, address: int, num_bytes: int) -> Region: ...
    def create_queue_pair(self, *, max_sends: int, max_receives: int) -> QueuePair: ...
    def take_event(self) -> None:
        """Consume one event; only when `fd` is readable."""
        ...

    def arm(self) -> None:
        """Ask for an event at the next completion."""
        ...

    def poll(self) -> Sequence[Completion]:
        """Some of the completions there are; empty when there are none."""
        ...

    def close(self) -> None: ...


class Binding(Protocol):
    @property
    def name(self) -> BindingName: ...
    def open(self, device: str, *, num_completions: int) -> Device: ...


class NoBinding(ImportError):
    """No binding to libibverbs can be imported."""


def load_binding(wanted: BindingName | None = None) -> Binding:
    """The wanted binding, else `ibverbs`, which lets other threads run during calls, else `pyverbs`.

    Raises:
        NoBinding: it is not installed, or libibverbs is not; the text says how to get them.
    """
    if wanted is not None and wanted not in get_args(BindingName):
        raise ValueError(f"binding must be one of {get_args(BindingName)}, got {wanted!r}")
    reasons: list[str] = []
    for name in (wanted,) if wanted else get_args(BindingName):
        try:
            module = importlib.import_module(f"fs_comm.transports.verbs_{name}")
        except (ImportError, OSError) as error:
            reasons.append(f"{name}: {error}")
        else:
            return module.BINDING
    raise NoBinding(
        f"the verbs transport needs a Python binding to libibverbs: {'; '.join(reasons)}; "
        "`pip install ibverbs` and the system's libibverbs (Debian: apt-get install libibverbs1 ibverbs-providers), "
        "or Debian's python3-pyverbs"
    )


def make_fork_safe() -> None:
    """Let this process fork (data loader workers) after memory was registered; must come before the first region.

    Without it the child's copy-on-write moves the parent's pages away from what the adapter writes to.
    """
    error = ctypes.CDLL("libibverbs.so.1").ibv_fork_init()
    if error:
        log.warning("ibv_fork_init failed with error %d: do not fork after this, or set RDMAV_FORK_SAFE=1", error)


def rdma_descriptors() -> set[int]:
    """The descriptors of open devices and their event channels in this process."""
    found: set[int] = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{name}")
        except OSError:  # the listing's own descriptor is gone by now
            continue
        if "infiniband" in target:  # /dev/infiniband/uverbs0, anon_inode:[infinibandevent]
            found.add(int(name))
    return found


def keep_mappings_from_children() -> None:
    """Leave the queues that a device has mapped into this process out of its forked children.

    A child's copy of the mapping would keep the device open, and so its queue pairs alive, after this process's death.
    """
    libc = ctypes.CDLL(None)
    with open("/proc/self/maps") as maps:
        for line in maps:
            if "/dev/infiniband/" in line:
                start, stop = (int(part, 16) for part in line.split(maxsplit=1)[0].split("-"))
                libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(stop - start), mmap.MADV_DONTFORK)
