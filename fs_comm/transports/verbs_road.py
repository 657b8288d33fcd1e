"""How large parts of exchanges move by verbs, once all ranks' headers have agreed."""

from collections.abc import Callable, Sequence

from torch._C._distributed_c10d import Store

from fs_comm.exchange import Turn
from fs_comm.transports.verbs import open_verbs
from fs_comm.transports.verbs_exchange import Flow, exchange, move, ring_flows
from fs_comm.wire import Op


class VerbsRoad:
    """Links to `peers`, for one thread at a time; all of them must open their ends at the same time."""

    def __init__(
        self,
        store: Store,
        rank: int,
        size: int,
        peers: Sequence[int],
        *,
        local_rank: int,
        timeout_s: float,
        name_of: Callable[[int], str],
    ) -> None:
        self._rank, self._joins_all = rank, len(peers) == size - 1
        self._transport = open_verbs(
            store, rank, list(peers), local_rank=local_rank, timeout_s=timeout_s, name_of=name_of
        )
        self._sends: list[Flow] = []
        self._receives: list[Flow] = []

    def begin(self, turn: Turn, sends: Sequence[int], receives: Sequence[int]) -> None:
        """AllGather goes around the ring if all ranks are joined by verbs; else each pair sees to itself."""
        x, self._turn = turn.exchange, turn
        if x.op == Op.ALL_GATHER and self._joins_all:
            self._sends, self._receives = ring_flows(self._rank, x.receive)
        else:
            self._sends = [Flow(p, x.send[p]) for p in sends]
            self._receives = [Flow(p, x.receive[p]) for p in reversed(receives)]
        self.advance()

    def advance(self) -> None:
        if any(flow.left for flow in (*self._sends, *self._receives)):
            move(self._transport, self._sends, self._receives)
            self._transport.progress()

    def complete(self) -> None:
        mesh, peers = self._turn.mesh, {flow.peer for flow in (*self._sends, *self._receives)}
        exchange(
            self._transport,
            self._sends,
            self._receives,
            timeout_s=self._turn.left_s,
            check=lambda: mesh.check(peers - mesh.departed),  # what one that left had sent still comes
        )
        self._sends, self._receives = [], []
        del self._turn

    def break_off(self) -> None:
        """The mesh is closed, which `complete` looks at once a second."""

    def close(self) -> None:
        self._transport.close()
