"""The plain way: every exchange where it is needed, with the training thread waiting for it.

What prioritized tables are compared with, bit for bit. It shares with them who owns a row and how gradients are added,
and nothing of what runs ahead. `Plain` is also how prioritized tables serve what was not announced.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from fs_embed.optim import RowOptimizer
from fs_embed.peers import Peers
from fs_embed.route import Keys, Route, exchange_ids
from fs_embed.step import Gradients
from fs_embed.store import Store

NO_LOOKUP, LOOKS_UP, EVALUATES = range(3)
"""Where a rank is while others may still look up for a step."""
NO_GRADIENTS, AS_ANNOUNCED, OTHERWISE, NOT_FINITE = range(4)
"""What a rank brings to an update; with one that is not finite, no rank updates."""


class Plain:
    """Exchanges over one group; every method is collective, and who calls one waits for it."""

    def __init__(self, store: Store, peers: Peers) -> None:
        self.store, self.peers = store, peers

    def fetch(self, keys: Keys) -> tuple[Route, Tensor]:
        """The rows of `keys` `(n,)` as they are now: `(U, D)`, and the way they came."""
        route = exchange_ids(self.peers, self.store, keys)
        rows = route.to_askers(self.peers, self.store.read(route.slots), phase="rows")
        return route, rows

    def push(self, gradients: Gradients | None, optimizer: RowOptimizer, divide_by: float) -> None:
        """One update by all ranks' gradients."""
        store = self.store
        route = exchange_ids(self.peers, store, self.no_keys() if gradients is None else Keys(gradients.keys, ()))
        if gradients is None:
            sums = store.no_rows()
        else:
            sums = route.sum_grads(gradients.values) / divide_by
        received = route.to_owners(self.peers, sums, phase="gradients")
        store.update_(route.slots, received, store.next_step(), optimizer)

    def no_keys(self) -> Keys:
        return Keys(torch.zeros(0, dtype=torch.int64, device=self.store.weight.device), ())


def kind_of(gradients: Gradients | None) -> int:
    if gradients is None:
        return NO_GRADIENTS
    if not is_finite(gradients.values):
        return NOT_FINITE
    return AS_ANNOUNCED if gradients.as_announced else OTHERWISE


def is_finite(values: Tensor) -> bool:
    """Whether no value is infinite or not a number, in one pass: both show in the smallest or the largest."""
    if not values.numel():
        return True
    return bool(torch.stack(torch.aminmax(values)).isfinite().all())


class SynchronousPart:
    """A step needs nothing of its own."""


class SynchronousEngine:
    """One store, exchanged by the training thread."""

    looks_ahead = False

    def __init__(self, store: Store, peers: Peers) -> None:
        self.store = store
        self._plain = Plain(store, peers)
        self.num_skipped = 0
        self._has_served = False  # the ranks of the step that comes have no more lookups

    def new_part(self, keys: Sequence[Keys] | None) -> SynchronousPart:
        return SynchronousPart()

    def announce(self, part: SynchronousPart) -> None:
        pass

    def begin(self, part: SynchronousPart, hit: bool, after: SynchronousPart | None) -> None:
        pass

    def look_up(self, part: SynchronousPart, keys: Keys, place: int | None) -> tuple[Tensor, Tensor]:
        self._plain.peers.agree("lookup", LOOKS_UP)
        route, rows = self._plain.fetch(keys)
        return rows, route.inverse

    @torch.no_grad()
    def serve(self) -> bool:
        if self._has_served:
            self._has_served = False
            return False
        return self._serve_lookups(self._plain.peers.agree("lookup", NO_LOOKUP))

    @torch.no_grad()
    def meet(self, num_closed: int) -> int:
        theirs = self._plain.peers.agree("lookup", EVALUATES)
        if all(place == EVALUATES for place in theirs):
            return 0
        self._has_served = not self._serve_lookups(theirs)
        return 1

    def _serve_lookups(self, places: Sequence[int]) -> bool:
        """Answers those ranks that look up, with no ids of its own, and says whether there was one."""
        if LOOKS_UP in places:
            self._plain.fetch(self._plain.no_keys())
        return LOOKS_UP in places

    @torch.no_grad()
    def finish(self, part: SynchronousPart, gradients: Gradients | None, divide_by: float) -> None:
        kinds = self._plain.peers.agree("update", kind_of(gradients))
        if NOT_FINITE in kinds:
            self.num_skipped += 1
        elif any(kinds):
            self._plain.push(gradients, self.store.optimizer_now(), divide_by)

    def evaluate(self, keys: Keys) -> Tensor:
        route, rows = self._plain.fetch(keys)
        return rows.index_select(0, route.inverse)

    def flush(self) -> None:
        """Nothing: no update is deferred."""

    def forget(self) -> None:
        """Nothing: no row was fetched ahead."""

    def exposed_wait_s(self) -> float:
        return sum(self._plain.peers.wait_s.values())

    def all_peers(self) -> list[Peers]:
        return [self._plain.peers]
