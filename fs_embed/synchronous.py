"""The plain way: every exchange where it is needed, with the training thread waiting for it.

What prioritized tables are compared with, bit for bit. It shares with them who owns a row and how gradients are added,
and nothing of what runs ahead. `Plain` is also how prioritized tables serve what was not announced.
"""

import struct
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

    def push(
        self, gradients: Gradients | None, optimizer: RowOptimizer, divide_by: float, route: Route | None = None
    ) -> None:
        """One update by all ranks' gradients; `route` where every rank has one for the ids of its gradients."""
        store = self.store
        if route is None:
            keys = self.no_keys() if gradients is None else Keys(gradients.keys, ())
            route = exchange_ids(self.peers, store, keys)
        sums = store.no_rows() if gradients is None else divided(route.sum_grads(gradients.values), divide_by)
        received = route.to_owners(self.peers, sums, phase="gradients")
        store.update_(route.slots, received, store.next_step(), optimizer)

    def no_keys(self) -> Keys:
        return Keys(torch.zeros(0, dtype=torch.int64, device=self.store.weight.device), ())


def kind_of(gradients: Gradients | None, finite: Tensor | None) -> int:
    """`finite`: of the step's gradients in all stores, None where none came for any."""
    if finite is not None and not bool(finite):
        return NOT_FINITE
    if gradients is None:
        return NO_GRADIENTS
    return AS_ANNOUNCED if gradients.as_announced else OTHERWISE


def agree_on_update(peers: Peers, kind: int, optimizer: RowOptimizer) -> tuple[Sequence[int], RowOptimizer]:
    """Collective: what each rank brings, and the optimizer as the first that brings gradients has it.

    A rank without a backward learns of its step's end later, when a scheduler may have set the next learning rate.
    """
    mine = struct.pack("d", optimizer.lr)
    theirs = peers.headers("update", [kind, *struct.unpack("q", mine)])
    for their_kind, bits, *_ in theirs:
        if their_kind != NO_GRADIENTS:
            optimizer = optimizer.with_lr(*struct.unpack("d", struct.pack("q", bits)))
            break
    return [their_kind for their_kind, *_ in theirs], optimizer


def divided(sums: Tensor, divide_by: float) -> Tensor:
    return sums if divide_by == 1.0 else sums / divide_by


class SynchronousPart:
    """A step needs nothing of its own."""


class SynchronousEngine:
    """One store, exchanged by the training thread."""

    looks_ahead = False

    def __init__(self, store: Store, peers: Peers) -> None:
        self.store = store
        self._plain = Plain(store, peers)
        self.num_skipped = 0
        self._has_skipped = False
        self._has_served = False  # the ranks of the step that comes have no more lookups
        self._rounds: list[tuple[Keys, Route]] = []  # of lookups in the step

    def new_part(self, keys: Sequence[Keys] | None) -> SynchronousPart:
        return SynchronousPart()

    def announce(self, part: SynchronousPart) -> None:
        pass

    def begin(self, part: SynchronousPart, hit: bool, after: SynchronousPart | None) -> None:
        pass

    def look_up(self, part: SynchronousPart, keys: Keys, place: int | None) -> tuple[Tensor, Tensor]:
        self._plain.peers.agree("lookup", LOOKS_UP)
        route, rows = self._plain.fetch(keys)
        self._rounds.append((keys, route))
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
            nothing = self._plain.no_keys()
            self._rounds.append((nothing, self._plain.fetch(nothing)[0]))
        return LOOKS_UP in places

    @torch.no_grad()
    def finish(
        self, part: SynchronousPart, gradients: Gradients | None, finite: Tensor | None, divide_by: float
    ) -> None:
        rounds, self._rounds = self._rounds, []
        kind = kind_of(gradients, finite)
        if kind in (AS_ANNOUNCED, OTHERWISE):  # nothing was announced: what counts is what was looked up
            assert gradients is not None
            is_the_lookup = len(rounds) == 1 and gradients.keys is rounds[0][0].values
            kind = AS_ANNOUNCED if is_the_lookup else OTHERWISE
        kinds, optimizer = agree_on_update(self._plain.peers, kind, self.store.optimizer_now())
        self._has_skipped = NOT_FINITE in kinds
        if self._has_skipped:
            self.num_skipped += 1
        elif any(kinds):
            # The ids of a step's only lookup need not travel again.
            route = rounds[0][1] if all(k == AS_ANNOUNCED for k in kinds) else None
            self._plain.push(gradients, optimizer, divide_by, route)

    def has_skipped(self) -> bool:
        return self._has_skipped

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
