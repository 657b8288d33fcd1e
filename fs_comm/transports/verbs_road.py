"""How a group's engine moves the large parts of an exchange by verbs."""

from collections.abc import Callable, Sequence

from torch import Tensor
from torch._C._distributed_c10d import Store

from fs_comm.transports.verbs import VerbsTransport, open_verbs, probe_verbs
from fs_comm.transports.verbs_exchange import Flow, all_gather, exchange
from fs_comm.transports.verbs_schedule import pairwise_all_to_all


def verbs_available_to_all(store: Store, rank: int, size: int, *, local_rank: int) -> str | None:
    """None when every rank can use verbs, else the first reason why one cannot; the same answer on every rank.

    All ranks of the group must call it.
    """
    mine = probe_verbs(local_rank=local_rank)
    store.set(f"verbs probe {rank}", ("+" if mine.ok else "-") + mine.reason)
    for r in range(size):
        text = store.get(f"verbs probe {r}").decode()
        if text[0] == "-":
            return f"rank {r}: {text[1:]}"
    return None


class VerbsRoad:
    """Links between all ranks of a group, for its engine's thread.

    Args:
        check: called while waiting, once a second at least; raises what the engine knows of its peers otherwise.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        size: int,
        *,
        local_rank: int,
        timeout_s: float,
        check: Callable[[], None],
    ) -> None:
        self._rank, self._size, self._check = rank, size, check
        peers = [p for p in range(size) if p != rank]
        self.transport: VerbsTransport = open_verbs(store, rank, peers, local_rank=local_rank, timeout_s=timeout_s)

    def all_gather(self, blocks: Sequence[Tensor], *, timeout_s: float) -> None:
        """Every rank's block to all, around the ring; this rank's own is in its place already. `(n,)` uint8 each."""
        all_gather(self.transport, self._rank, blocks, timeout_s=timeout_s, check=self._check)

    def all_to_all(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], *, over_bytes: int, timeout_s: float
    ) -> None:
        """What is for and from the other ranks, where it has more than `over_bytes`; the rest came another way."""
        steps = pairwise_all_to_all(self._rank, self._size)
        sends = [Flow(s.send_to, inputs[s.send_to]) for s in steps]
        receives = [Flow(s.receive_from, outputs[s.receive_from]) for s in steps]
        exchange(
            self.transport,
            [f for f in sends if f.left > over_bytes],
            [f for f in receives if f.left > over_bytes],
            timeout_s=timeout_s,
            check=self._check,
        )

    def close(self) -> None:
        self.transport.close()
