"""The ranks that balance together, and the few collectives that this takes.

One thread at a time may call a `World`: its collectives have one order, and a process group of their own.
"""

import contextlib
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from fs_data.errors import LoaderError, RankLost

_TEXT_BYTES = 1 << 20
_HEARTBEAT_PATIENCE_S = 2.0


class World(Protocol):
    """R ranks, this one among them. All methods but `close` are collective and block."""

    rank: int
    size: int

    def gather(self, numbers: NDArray[np.int64], what: str) -> NDArray[np.int64]:
        """`(R, n)`: every rank's `numbers` `(n,)`, whose n must agree; `what` names the wait in errors."""
        ...

    def shuffle(self, blocks: Tensor, send_bytes: Sequence[int], recv_bytes: Sequence[int]) -> Tensor:
        """uint8: what each rank sent to this one, in rank order; `blocks` holds what goes to each, in rank order."""
        ...


class Alone:
    """One rank, without communication."""

    rank, size = 0, 1

    def gather(self, numbers: NDArray[np.int64], what: str) -> NDArray[np.int64]:
        return numbers[None]

    def shuffle(self, blocks: Tensor, send_bytes: Sequence[int], recv_bytes: Sequence[int]) -> Tensor:
        return blocks


class Ranks:
    """The ranks of a process group, through plain torch.distributed calls."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)

    def gather(self, numbers: NDArray[np.int64], what: str) -> NDArray[np.int64]:
        mine = torch.from_numpy(np.ascontiguousarray(numbers, dtype=np.int64))
        everyone = torch.empty(self.size * len(mine), dtype=torch.int64, device="cpu")  # not a default of the user's
        with self._naming_lost_ranks(what):
            _ALL_GATHER(everyone, mine, group=self.group)
        return everyone.view(self.size, len(mine)).numpy()

    def shuffle(self, blocks: Tensor, send_bytes: Sequence[int], recv_bytes: Sequence[int]) -> Tensor:
        received = torch.empty(sum(recv_bytes), dtype=torch.uint8, device=blocks.device)
        with self._naming_lost_ranks("the shuffle of samples"):
            dist.all_to_all_single(received, blocks, list(recv_bytes), list(send_bytes), group=self.group)
        return received

    def _naming_lost_ranks(self, what: str) -> "_NamingLostRanks":
        return _NamingLostRanks(self.group, what)


class _NamingLostRanks(contextlib.AbstractContextManager[None]):
    """Turns a failed collective into RankLost with the ranks that are gone."""

    def __init__(self, group: dist.ProcessGroup, what: str) -> None:
        self.group, self.what = group, what

    def __enter__(self) -> None:
        self.start = time.monotonic()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, RuntimeError):
            seconds = time.monotonic() - self.start
            lost, why = _lost_ranks(self.group, error)
            if not lost:
                raise LoaderError(f"{self.what} failed, although all ranks are there: {error}") from error
            names = ", ".join(f"rank {r}" for r in lost)
            raise RankLost(
                lost,
                f"{names} {why} during {self.what} (after {seconds:.1f} s); restart from the last checkpoint: {error}",
            ) from error


def _lost_ranks(group: dist.ProcessGroup, error: RuntimeError) -> tuple[tuple[int, ...], str]:
    """The group's ranks that are gone: named by the error or by heartbeats where there are any, else by a roll call."""
    peer = getattr(error, "peer", None)
    if isinstance(peer, int):
        return (peer,), "was lost"
    ask: Callable[[], dict[int, str]] | None = getattr(group, "lost_ranks", None)
    deadline = time.monotonic() + _HEARTBEAT_PATIENCE_S
    while ask is not None and time.monotonic() < deadline:
        if found := ask():
            return tuple(dist.get_group_rank(group, r) for r in sorted(found)), "was lost"
        time.sleep(0.05)
    try:
        return _roll_call(group), "died or did not answer"
    except Exception:
        return (0,), "(which hosts the store) died or did not answer"


def _roll_call(group: dist.ProcessGroup, patience_s: float = 5.0) -> tuple[int, ...]:
    """Every rank whose collective failed signs in at the store; those that do not within `patience_s` are gone."""
    store = dist.distributed_c10d._get_default_store()  # pyright: ignore[reportPrivateUsage]
    prefix = f"fs_data/{group.group_name}/roll_call"
    store.set(f"{prefix}/{dist.get_rank(group)}", "here")
    deadline = time.monotonic() + patience_s
    missing = set(range(dist.get_world_size(group)))
    while missing and time.monotonic() < deadline:
        missing = {r for r in missing if not store.check([f"{prefix}/{r}"])}
        time.sleep(0.05)
    return tuple(sorted(missing))


def make_world(group: dist.ProcessGroup | None, timeout_s: float) -> World:
    """The ranks of `group`; by default a new group of all ranks (collective), or this process alone."""
    if group is None:
        if not dist.is_initialized():
            return Alone()
        group = _new_group(timeout_s)
    if dist.get_rank(group) < 0:
        raise ValueError("group must have this rank in it; on others, train without a loader of that group")
    return Ranks(group) if dist.get_world_size(group) > 1 else Alone()


def gather_texts(world: World, text: str) -> list[str]:
    """Collective: every rank's text, cut to a megabyte."""
    data = text.encode(errors="replace")[:_TEXT_BYTES]
    what = "the exchange of error messages"
    longest = int(world.gather(np.asarray([len(data)], np.int64), what).max())
    rows = world.gather(bytes_to_ints(data.ljust(longest, b"\0")), what)
    return [row.tobytes().rstrip(b"\0").decode(errors="replace") for row in rows]


def bytes_to_ints(data: bytes) -> NDArray[np.int64]:
    """`data`, filled up with zero bytes, as int64 to gather."""
    return np.frombuffer(bytearray(data.ljust(-(-len(data) // 8) * 8, b"\0")), np.int64)


def _new_group(timeout_s: float) -> dist.ProcessGroup:
    import fs_comm

    if hasattr(fs_comm, "new_group"):
        return fs_comm.new_group(timeout_s=timeout_s)  # pyright: ignore
    group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))
    assert isinstance(group, dist.ProcessGroup)
    return group


# torch 2.13 renamed it, and warns about the old name.
_ALL_GATHER: Any = getattr(
    dist, "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
)
