"""Exchange over an inner gloo group: between hosts, and wherever nothing better serves."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

_TAG = 0x5F5  # apart from what users send over the same group


def exchange(inner: Any, rank: int, sends: Sequence[Tensor], receives: Sequence[Tensor], *, over_bytes: int) -> None:
    """Part p of `sends` to each other rank p, part p of `receives` from it; parts of `over_bytes` or less stay out.

    All receives are posted before the first send. gloo's own AllToAll sends first: the note that a receive is posted
    then waits behind the bulk of the other direction, and the two directions of a slow link run one after the other.
    """
    peers = [(rank + i) % len(sends) for i in range(1, len(sends))]
    works = [inner.recv([receives[p]], p, _TAG) for p in reversed(peers) if receives[p].numel() > over_bytes]
    works += [inner.send([sends[p]], p, _TAG) for p in peers if sends[p].numel() > over_bytes]
    for work in works:
        work.wait()
