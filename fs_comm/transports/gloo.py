"""Exchange over a gloo group of its own: between hosts, and wherever nothing better serves."""

import contextlib
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store

from fs_comm.errors import PeerLost
from fs_comm.exchange import Turn

_EXPLAIN_S = 1.0
"""How long a peer whose gloo connection broke has to say why, on the mesh."""


class GlooRoad:
    """Posts all receives before the first send.

    gloo's own AllToAll sends first: the note that a receive is posted then waits behind the bulk of the other
    direction, and the two directions of a slow link run one after the other.
    """

    def __init__(self, store: Store, rank: int, size: int, *, timeout_s: float) -> None:
        self._group: Any = dist.ProcessGroupGloo(store, rank, size, timedelta(seconds=timeout_s))
        self._size, self._rank = size, rank

    def begin(self, turn: Turn, sends: Sequence[int], receives: Sequence[int]) -> None:
        x, self._turn, self._peers = turn.exchange, turn, sorted({*sends, *receives})
        self._works: list[Any] = []
        try:
            self._works += [self._group.recv([x.receive[p]], p, 0) for p in reversed(receives)]
            self._works += [self._group.send([x.send[p]], p, 0) for p in sends]
        except RuntimeError as error:  # a peer has given up since it said that it takes part
            self._works.clear()
            self._explain(error)

    def complete(self) -> None:
        try:
            for work in self._works:
                work.wait(timedelta(milliseconds=max(1, int(self._turn.left_s * 1e3))))  # 0 would mean: for ever
        except RuntimeError as error:
            self._explain(error)
        finally:
            self._works.clear()
        del self._turn

    def advance(self) -> None:
        """gloo has a thread of its own."""

    def break_off(self) -> None:
        # gloo can be told to stop in one way only: when a wait runs out of time, it closes all of its group's
        # connections, and so all waits end, here and at the peers.
        if (group := self._group) is None:  # closed before
            return
        with contextlib.suppress(RuntimeError):
            peer = (self._rank + 1) % self._size
            group.recv([torch.empty(1, dtype=torch.uint8)], peer, 1).wait(timedelta(milliseconds=1))

    def close(self) -> None:
        self._group = None

    def _explain(self, error: RuntimeError) -> None:
        """Raises what the mesh knows of the peers, or else what gloo says."""
        if self._turn.left_s <= 0.001:
            self._turn.mesh.check(self._peers)
            raise self._turn.timeout(self._peers) from error
        deadline = time.monotonic() + _EXPLAIN_S
        while time.monotonic() < deadline:
            self._turn.mesh.check(self._peers)
            time.sleep(0.02)
        raise PeerLost(f"{self._turn.exchange}: a connection to another host broke: {error}") from error
