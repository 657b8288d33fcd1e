"""How a group's engine moves the large parts of an exchange by verbs, once all ranks' headers have agreed."""

from collections.abc import Callable, Sequence

from torch import Tensor
from torch._C._distributed_c10d import Store

from fs_comm.transports.verbs import open_verbs, probe_verbs
from fs_comm.transports.verbs_exchange import Flow, all_gather, exchange
from fs_comm.transports.verbs_schedule import pairwise_all_to_all


def why_not_verbs(store: Store, rank: int, size: int, *, local_rank: int) -> str | None:
    """None when every rank can use verbs, else why the first one that cannot does not; the same on every rank.

    All ranks of the group must call it.
    """
    mine = probe_verbs(local_rank=local_rank)
    store.set(f"verbs probe {rank}", ("+" if mine.ok else "-") + mine.reason)
    for r in range(size):
        text = store.get(f"verbs probe {r}").decode()
        if text[0] == "-":
            return text[1:]
    return None


class VerbsRoad:
    """Links between all ranks of a group, for its engine's thread.

    Args:
        check: called while waiting, once a second at least; raises what the engine learns of its peers another way.
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
        name_of: Callable[[int], str],
    ) -> None:
        self._rank, self._size, self._timeout_s, self._check = rank, size, timeout_s, check
        peers = [p for p in range(size) if p != rank]
        self._transport = open_verbs(store, rank, peers, local_rank=local_rank, timeout_s=timeout_s, name_of=name_of)

    def all_gather(self, blocks: Sequence[Tensor]) -> None:
        """Every rank's block to all, around the ring; `(n,)` uint8 by rank, this rank's own in its place already."""
        all_gather(self._transport, self._rank, blocks, timeout_s=self._timeout_s, check=self._check)

    def all_to_all(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], *, over_bytes: int) -> None:
        """What is for and from the other ranks and has more than `over_bytes`; the rest came with the headers."""
        steps = pairwise_all_to_all(self._rank, self._size)
        sends = [Flow(step.send_to, inputs[step.send_block]) for step in steps]
        receives = [Flow(step.receive_from, outputs[step.receive_block]) for step in steps]
        exchange(
            self._transport,
            [flow for flow in sends if flow.left > over_bytes],
            [flow for flow in receives if flow.left > over_bytes],
            timeout_s=self._timeout_s,
            check=self._check,
        )

    def close(self) -> None:
        self._transport.close()
