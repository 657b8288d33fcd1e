"""Prioritized lookups: everything overlaps with compute but the rows that two consecutive batches share (Algorithm 2).

One thread a store carries out all exchanges of training, in one order that every rank keeps:

    open(i)      by forward(i): headers; ids of i+1 to their owners; the owners split the rows of i and i+1, for all
                 ranks together, and send the rows that i+1 has alone
    update(i)    by backward(i): gradients of the rows that i+1 holds too, their update, their new values for i+1
    defer(i)     the other gradients and their update
    prime(i+1)   where open(i) could not look ahead: ids and rows of i+1, fetched as soon as they are announced

forward(i) waits for update(i-1) alone. Since defer(i-1) comes before open(i), what is looked up for i+1 holds every
update but those of step i, whose rows are not among them.

A rank that looks up what it did not announce says so in open(i)'s header. The step is then carried out without looking
ahead, by all ranks: lookups are served round by round until the rank's backward, one plain update follows, and
prime(i+1) fetches the next batch after it.

Legend: U distinct ids of this rank, Q requests that reach it as an owner, D features.
"""

import queue
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

import fs_kernels
from fs_embed.errors import ExchangeTimeout, StaleRow
from fs_embed.optim import RowOptimizer
from fs_embed.peers import Peers
from fs_embed.route import Keys, Route, exchange_ids
from fs_embed.step import Gradients
from fs_embed.store import Store
from fs_embed.synchronous import AS_ANNOUNCED, NO_GRADIENTS, NOT_FINITE, Plain, agree_on_update, divided, kind_of
from fs_embed.worker import Job, Latch, Worker


class PrioritizedPart:
    """One step of one store: what is known of its rows, on this rank as an asker and as an owner."""

    def __init__(self, keys: Sequence[Keys] | None) -> None:
        self.keys = keys
        """`(n,)` of each announced lookup; None for a step that was not announced."""
        self.ready = Latch("the rows of a batch")
        self.requests: queue.SimpleQueue[Job[tuple[Route, Tensor]] | None] = queue.SimpleQueue()
        """Lookups that were not announced, then None."""
        # Written by the worker.
        self.route: Route | None = None
        self.missed = False
        self.after: PrioritizedPart | None = None
        """The next step, where its rows could be told from this one's."""
        self.from_before: Tensor | None = None  # (U,) bool: the step before holds the row; None: it was not asked
        self.asked_from_before: Tensor | None = None  # (Q,)
        self.into_after = self.asked_into_after = torch.zeros(0, dtype=torch.bool)  # (U,), (Q,)
        self.exclusive_rows = self.colliding_rows = torch.zeros(0)
        self.versions: Tensor | None = None  # (Q,) of the rows when they were read, where that is checked
        self._merged: Tensor | None = None

    def rows(self) -> Tensor:
        """`(U, D)` of the announced ids, once `ready`."""
        if self._merged is None:
            self._merged = self._merge()
        return self._merged

    def _merge(self) -> Tensor:
        if self.from_before is None:
            return self.exclusive_rows
        colliding = torch.cumsum(self.from_before, 0)
        exclusive = torch.arange(1, len(colliding) + 1, device=colliding.device) - colliding
        source = torch.where(self.from_before, ~(colliding - 1), exclusive - 1)
        return fs_kernels.merge_rows(self.exclusive_rows, self.colliding_rows, source)


class PrioritizedEngine:
    """One store. Methods are called by the training thread (and autograd's), those with an underscore by the worker."""

    looks_ahead = True

    def __init__(self, store: Store, peers: Peers, evaluation: Peers, *, timeout_s: float) -> None:
        self.store, self.timeout_s = store, timeout_s
        self._peers = peers
        self._training, self._evaluation = Plain(store, peers), Plain(store, evaluation)
        self.worker = Worker("fs_embed", store.weight.device)
        self._last: Job[None] | None = None  # the newest defer
        self._updated: Job[_Backward | None] | None = None  # the newest update
        self._exposed_s = 0.0
        self.num_skipped = 0
        # The worker's own.
        self._has_skipped = False  # in the newest update
        self._is_open = False  # between open and update
        self._looked_ahead = False  # the rows of the coming step are on their way
        self._coming: PrioritizedPart | None = None  # the coming step, where it was announced and is not fetched

    def new_part(self, keys: Sequence[Keys] | None) -> PrioritizedPart:
        part = PrioritizedPart(keys)
        self.worker.watch(part.ready)
        return part

    def announce(self, part: PrioritizedPart) -> None:
        """The step after the last one that began, which began without knowing it."""
        self.worker.submit(lambda: self._announce(part), "the announcement of a batch")

    def begin(self, part: PrioritizedPart, hit: bool, after: PrioritizedPart | None) -> None:
        """`hit`: the step looks up what was announced for it."""
        self.worker.submit(lambda: self._open(part, hit, after), "the opening of a step")

    def look_up(self, part: PrioritizedPart, keys: Keys, place: int | None) -> tuple[Tensor, Tensor]:
        """`(U, D)` and `(n,)` into it, for lookup number `place` of the announced ones, or for any other `keys`."""
        if place is None:
            request = Job(lambda: self._training.fetch(keys), "rows that were not prefetched")
            self.worker.watch(request)
            part.requests.put(request)
            self._wait(request)
            route, rows = request.result(self.timeout_s)
            return rows, route.inverse
        self._wait(part.ready)
        assert part.route is not None
        assert part.keys is not None
        return part.rows(), part.route.inverse.split([len(k.values) for k in part.keys])[place]

    def _wait(self, latch: Latch) -> None:
        started = time.perf_counter()
        latch.wait(self.timeout_s)
        self._exposed_s += time.perf_counter() - started

    def finish(
        self, part: PrioritizedPart, gradients: Gradients | None, finite: Tensor | None, divide_by: float
    ) -> None:
        """The step's backward, or that it will have none."""
        part.requests.put(None)
        optimizer = self.store.optimizer_now()  # as it is now: a scheduler may change it before defer reads it
        updated = self.worker.submit(lambda: self._update(part, gradients, finite, optimizer, divide_by), "an update")
        self._updated = updated
        self._last = self.worker.submit(lambda: self._defer(part, updated), "the deferred updates")
        self.worker.submit(self._prime_coming, "the rows of the next batch")  # flush does not wait for this one

    def has_skipped(self) -> bool:
        if self._updated is not None:
            self._updated.wait(self.timeout_s)
        return self._has_skipped

    def serve(self) -> bool:
        return False  # the worker does

    def meet(self, num_closed: int) -> int:
        return max(self._evaluation.peers.agree("lookup", num_closed)) - num_closed

    def evaluate(self, keys: Keys) -> Tensor:
        """On a group of its own, since the worker may be waiting for a rank that is here already."""
        self.flush()
        route, rows = self._evaluation.fetch(keys)
        return rows.index_select(0, route.inverse)

    def flush(self) -> None:
        """Waits until all updates are in the table; no other rank has to call it."""
        if self._last is not None:
            self._last.wait(self.timeout_s)

    def forget(self) -> None:
        """The table was overwritten: rows that were fetched are wrong."""

    def exposed_wait_s(self) -> float:
        return self._exposed_s

    def all_peers(self) -> list[Peers]:
        return [self._peers, self._evaluation.peers]

    # Run by the worker.

    def _announce(self, part: PrioritizedPart) -> None:
        if self._is_open:
            self._coming = part  # update fetches it
        else:
            self._prime(part)

    def _prime(self, part: PrioritizedPart) -> None:
        """Fetches the rows of the coming step, as they are after all others."""
        self._looked_ahead, self._coming = True, None
        keys = self._training.no_keys() if part.keys is None else Keys.join(part.keys)
        part.route, part.exclusive_rows = self._training.fetch(keys)
        part.versions = self._versions_of(part.route)
        part.from_before = None
        part.ready.set(self.worker.stream)

    def _open(self, part: PrioritizedPart, hit: bool, after: PrioritizedPart | None) -> None:
        if not self._looked_ahead:
            self._prime(part)
        self._is_open = True
        stale = self._stale_row(part)
        theirs = self._peers.agree("open", int(hit) + 2 * int(after is not None) + 4 * int(bool(stale)))
        part.missed = any(not flags & 1 for flags in theirs)
        self._looked_ahead = not part.missed and all(flags & 2 for flags in theirs)
        found_by = [rank for rank, flags in enumerate(theirs) if flags & 4]
        if found_by and not part.missed:
            raise StaleRow(stale or f"rows must be read after their last update, not as on ranks {found_by}")
        if part.missed:
            self._coming = after
            self._serve(part)
            return
        assert part.route is not None
        if self._looked_ahead:
            assert after is not None
            self._split(part, after)
        else:
            self._coming = after
            part.into_after = torch.zeros_like(part.route.owner, dtype=torch.bool)
            part.asked_into_after = torch.zeros_like(part.route.slots, dtype=torch.bool)

    def _versions_of(self, route: Route) -> Tensor | None:
        return None if self.store.versions is None else self.store.versions[route.slots]

    def _stale_row(self, part: PrioritizedPart) -> str:
        """By now all updates before this step are in the table: a row written since it was read was read too early."""
        if part.route is None or part.versions is None or self.store.versions is None:
            return ""
        stale = (part.versions != self.store.versions[part.route.slots]).nonzero()
        if not len(stale):
            return ""
        table, row = self.store.shards.row_at(int(part.route.slots[stale[0]]), self._peers.rank)
        return (
            f"rows must be read after their last update: {len(stale)} of those read for a step were not, the first of "
            f"them row {row} of table {self.store.table_names[table]!r}; please report this"
        )

    def _serve(self, part: PrioritizedPart) -> None:
        """Lookups that were not announced, until no rank has any more: until their backwards."""
        request = self._next_request(part)
        while any(self._peers.agree("lookup", int(request is not None))):
            if request is None:
                self._training.fetch(self._training.no_keys())
            else:
                request.run(self.worker.stream)
                request = self._next_request(part)

    def _next_request(self, part: PrioritizedPart) -> "Job[tuple[Route, Tensor]] | None":
        try:
            return part.requests.get(timeout=self.timeout_s)
        except queue.Empty:
            raise ExchangeTimeout(
                f"a step's backward must follow within {self.timeout_s:.0f} s of a forward that was not prefetched"
            ) from None

    def _split(self, part: PrioritizedPart, after: PrioritizedPart) -> None:
        """The owner tells, for all ranks together, which rows two steps share; and sends what the later has alone."""
        now, peers = part.route, self._peers
        assert now is not None
        assert after.keys is not None
        part.after = after
        later = after.route = exchange_ids(peers, self.store, Keys.join(after.keys))
        part.asked_into_after = self._shared(now, later)
        after.asked_from_before = self._shared(later, now)
        part.into_after = now.to_askers(peers, part.asked_into_after.byte(), phase="collisions").bool()
        after.from_before = later.to_askers(peers, after.asked_from_before.byte(), phase="collisions").bool()
        alone = ~after.asked_from_before
        after.versions = self._versions_of(later)
        rows = self.store.read(later.slots[alone])
        wanted = ~after.from_before
        after.exclusive_rows = later.to_askers(peers, rows, of=alone, wanted=wanted, phase="exclusive rows")

    def _shared(self, route: Route, other: Route) -> Tensor:
        """`(Q,)` bool: which of this owner's rows that one step asks for the other asks for too, from any rank."""
        return fs_kernels.collision_split(route.slots, other.slots)

    def _update(
        self,
        part: PrioritizedPart,
        gradients: Gradients | None,
        finite: Tensor | None,
        optimizer: RowOptimizer,
        divide_by: float,
    ) -> "_Backward | None":
        """The rows that the next step waits for come first; what is left to defer is returned."""
        self._is_open = False
        kinds, optimizer = agree_on_update(self._peers, kind_of(gradients, finite), optimizer)
        backward: _Backward | None = None
        self._has_skipped = NOT_FINITE in kinds
        if self._has_skipped:
            self.num_skipped += 1
        elif part.missed or any(kind not in (NO_GRADIENTS, AS_ANNOUNCED) for kind in kinds):
            if any(kinds):
                self._training.push(gradients, optimizer, divide_by)
        elif any(kinds):
            backward = _Backward(gradients, kinds, self.store.next_step(), optimizer, divide_by)
            slots, grads = self._push(part, backward, part.into_after, part.asked_into_after, "colliding gradients")
            self.store.update_(slots, grads, backward.number, optimizer)
        if part.after is not None:
            self._send_colliding_rows(part.after)
        part.after = None
        return backward

    def _send_colliding_rows(self, after: PrioritizedPart) -> None:
        later, shared, wanted = after.route, after.asked_from_before, after.from_before
        assert later is not None
        assert shared is not None
        assert wanted is not None
        rows = self.store.read(later.slots[shared])
        if after.versions is not None and self.store.versions is not None:
            after.versions[shared] = self.store.versions[later.slots[shared]]
        after.colliding_rows = later.to_askers(self._peers, rows, of=shared, wanted=wanted, phase="colliding rows")
        after.ready.set(self.worker.stream)

    def _defer(self, part: PrioritizedPart, updated: "Job[_Backward | None]") -> None:
        backward = updated.result(0.0)
        if backward is not None:
            sent, asked = ~part.into_after, ~part.asked_into_after
            slots, grads = self._push(part, backward, sent, asked, "exclusive gradients")
            self._apply_deferred(slots, grads, backward.number, backward.optimizer)
        part.route = None

    def _push(
        self, part: PrioritizedPart, backward: "_Backward", sent: Tensor, asked: Tensor, phase: str
    ) -> tuple[Tensor, Tensor]:
        """Gradients of the rows `sent` `(U,)` to their owners: slots and gradients of the requests `asked` `(Q,)`."""
        route = part.route
        assert route is not None
        if backward.gradients is None:
            sums = self.store.weight.new_zeros(int(sent.sum()), self.store.dim)
        else:
            sums = divided(route.sum_grads(backward.gradients.values, of=sent), backward.divide_by)
        received = route.to_owners(self._peers, sums, of=asked, sent=sent, phase=phase)
        slots = route.slots[asked]
        if NO_GRADIENTS not in backward.kinds:
            return slots, received
        # A rank without a backward sent zeros, which count as absent.
        came = torch.tensor([kind != NO_GRADIENTS for kind in backward.kinds], device=slots.device)
        came = came[route.asker[asked]]
        return slots[came], received[came]

    def _apply_deferred(self, slots: Tensor, grads: Tensor, number: int, optimizer: RowOptimizer) -> None:
        self.store.update_(slots, grads, number, optimizer)

    def _prime_coming(self) -> None:
        if self._coming is not None and not self._looked_ahead:
            self._prime(self._coming)


@dataclass(frozen=True, slots=True)
class _Backward:
    """One step's gradients, and how they are applied."""

    gradients: Gradients | None
    kinds: Sequence[int]
    """What each rank brought."""
    number: int
    optimizer: RowOptimizer
    divide_by: float
