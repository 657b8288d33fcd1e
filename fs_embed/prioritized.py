"""Prioritized lookups: everything overlaps with compute but the rows that two consecutive batches share (Algorithm 2).

Two threads with a process group each. *Bulk* carries ids, exclusive rows and exclusive gradients; *urgent* carries what
the next forward waits for, and is never behind bulk. Jobs are queued by the training thread in program order, which is
the same on every rank, so that messages pair.

    prefetch(i+1)   bulk    ids of i+1 to their owners
    forward(i)      bulk    open(i): apply the exclusive gradients of i-1; split the rows of i and i+1; send the
                            exclusive rows of i+1
                    waits for open(i-1) and update(i-1): what came for i
    backward(i)     urgent  update(i): colliding gradients, their rows' update, and the new values for i+1
                    bulk    defer(i): exclusive gradients; open(i+1) or flush() applies them

Where a rank looks up what it did not announce, all rows of the step and of the next batch count as colliding: the same
program with nothing running ahead, so always exact.

Legend: U distinct ids of this rank, Q requests that reach it as an owner, D features.
"""

import time
import warnings
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from fs_embed.errors import RanksDisagree
from fs_embed.peers import Peers
from fs_embed.route import BadId, Route, exchange_ids
from fs_embed.step import Step
from fs_embed.store import Store
from fs_embed.ticket import Ticket, signature
from fs_embed.worker import Job, Worker

T = TypeVar("T")

_MISS = -1


@dataclass(slots=True)
class Announced:
    """One lookup of a batch to come."""

    ids: Tensor
    """The tensor that forward will be called with."""
    keys: Tensor
    """`(n,)`, see `RowShards.keys`."""
    bad: BadId | None


class _Step(Step):
    """A step with what the threads find out about it."""

    def __init__(self, lookup: "PrioritizedLookup", ticket: Ticket | None) -> None:
        super().__init__(lookup._backward)  # pyright: ignore[reportPrivateUsage]  the two are one mechanism
        self.ticket = ticket
        self.opened: Job[tuple[Route, Tensor] | None]  # the rows of the first lookup, where it was not announced
        self.update: Job[None]
        self.inverse: Sequence[Tensor] = ()  # of each announced lookup
        self.rows = torch.zeros(0)  # (U, D) of the announced batch
        # Written by open(i) and by lookups that were not announced, before update(i) reads them.
        self.missed = False
        self.consumed = _MISS  # the ticket that some rank used
        self.next: Ticket | None = None
        self.collides = self.asked_collides = torch.zeros(0, dtype=torch.bool)  # (U,), (Q,): does i+1 hold the row?
        self.deferred: tuple[Route, Tensor, Tensor, int] | None = None  # route, sums (U, D), ranks with gradients, step


class PrioritizedLookup:
    def __init__(
        self, store: Store, bulk: Peers, urgent: Peers, table_names: Sequence[str], *, divide_by: int, timeout_s: float
    ) -> None:
        self.store, self.table_names, self.divide_by, self.timeout_s = store, table_names, divide_by, timeout_s
        self.bulk_peers, self.urgent_peers = bulk, urgent
        self._bulk = Worker("fs_embed bulk", store.weight.device)
        self._urgent = Worker("fs_embed urgent", store.weight.device)
        self._tickets: deque[Ticket] = deque()
        self._num_tickets = 0
        self._num_jobs = 0
        self._step: _Step | None = None
        self._pending: tuple[Tensor, Tensor, int] | None = None  # slots, gradients, step; bulk's alone
        self._idle = True  # nothing deferred, no step open
        self._exposed_s = 0.0
        self._hits = self._misses = 0

    # Called by the training thread.

    def prefetch(self, lookups: Sequence[Announced] | None) -> None:
        if lookups is None:
            return
        keys = [lookup.keys for lookup in lookups]
        bad = next((lookup.bad for lookup in lookups if lookup.bad), None)
        tag = self._tag()
        shards = self.store.shards
        routed = self._bulk.submit(
            lambda: exchange_ids(self.bulk_peers, shards, torch.cat(keys), self.table_names, tag=tag, bad=bad),
            "the ids of a prefetched batch",
        )
        held = [lookup.ids for lookup in lookups]
        ticket = Ticket(self._num_tickets, held, [signature(ids) for ids in held], keys, routed)
        self._num_tickets += 1
        if self._idle and not self._tickets:  # no step comes before, so none can change its rows
            ticket.fetched = self._bulk.submit(lambda: self._fetch_first(ticket), "the rows of the first batch")
        self._tickets.append(ticket)

    def forward(self, ids: Tensor, keys: Tensor, bad: BadId | None) -> Tensor:
        """`(n, D)` for `keys` `(n,)`; `ids` is what tells whether they were announced."""
        step, mark = self._step, signature(ids)
        is_new = step is None or step.started or step.closed
        if not is_new and not self._is_next_of(step, mark) and self._find(mark):
            is_new = True  # the step's backward never came: the announced batch begins another one
        if is_new:
            step = self._begin(mark, keys, bad)
            if step.ticket is None:
                opened = self._wait(step.opened)
                assert opened is not None
                self._drop_used(step)
                route, rows = opened
                return step.look_up(keys, rows, route.inverse)
        assert step is not None
        if self._is_next_of(step, mark):
            return step.look_up(keys, step.rows, step.inverse[len(step.keys)])
        current, tag = step, self._tag()
        extra = self._bulk.submit(lambda: self._fetch_extra(current, keys, bad, tag), "rows that were not prefetched")
        route, rows = self._wait(extra)
        return step.look_up(keys, rows, route.inverse)

    def evaluate(self, keys: Tensor, bad: BadId | None) -> Tensor:
        """As forward, without gradients; announced batches stay announced."""
        before, tag = self._last_update(), self._tag()
        job = self._bulk.submit(lambda: self._fetch_now(before, keys, bad, tag), "an evaluation's rows")
        route, rows = job.wait(self.timeout_s)
        return rows.index_select(0, route.inverse)

    def flush(self) -> None:
        """Applies what is deferred; no collective of its own."""
        before = self._last_update()
        self._wait(self._bulk.submit(lambda: self._settle(before), "the deferred updates"))
        self._idle = self._step is None or self._step.closed

    def reset(self) -> None:
        """Drops announced batches and deferred updates: the tables are about to be overwritten."""
        self.flush()
        self._tickets.clear()
        self._step = None

    def close(self) -> None:
        self._bulk.close()
        self._urgent.close()

    def stats(self) -> dict[str, float]:
        return {
            "exposed_wait_s": self._exposed_s,
            "bytes_sent": self.bulk_peers.bytes_sent + self.urgent_peers.bytes_sent,
            "hits": self._hits,
            "misses": self._misses,
        }

    def _begin(self, mark: object, keys: Tensor, bad: BadId | None) -> _Step:
        if self._step is not None:
            self._step.close()
        before = self._last_update()
        found = self._find(mark)
        if found:
            while self._tickets.popleft() is not found:
                pass  # announced, never looked up: the loop that announced it has ended
        served = found if found and found.fetched is not None else None
        step = self._step = _Step(self, served)
        waiting, tag = list(self._tickets), self._tag()
        step.opened = self._bulk.submit(
            lambda: self._open(step, before, waiting, keys, bad, tag), "the rows of a batch"
        )
        if self._tickets:
            self._tickets[0].fetched = step.opened
        self._idle = False
        if served is None:
            self._misses += 1
            if self._misses == 1:
                warnings.warn(
                    "a batch reached prioritized tables without having been prefetched: this step's exchange is not "
                    "overlapped. Results are exact all the same; stats()['misses'] counts such steps",
                    stacklevel=4,
                )
            return step
        self._hits += 1
        assert served.fetched is not None
        self._wait(served.fetched)
        if served.previous is not None:
            self._wait(served.previous.update)
        step.rows = served.merged()
        step.inverse = self._wait(served.routed).inverse.split([len(k) for k in served.keys])
        return step

    def _last_update(self) -> Job[None] | None:
        """What must be done before anything that is deferred may be applied."""
        return self._step.update if self._step is not None and self._step.closed else None

    def _find(self, mark: object) -> Ticket | None:
        return next((t for t in self._tickets if t.signatures[0] == mark), None)

    @staticmethod
    def _is_next_of(step: _Step | None, mark: object) -> bool:
        """Whether this is the announced batch's next lookup."""
        if step is None or step.ticket is None or len(step.keys) >= len(step.ticket.signatures):
            return False
        return step.ticket.signatures[len(step.keys)] == mark

    def _drop_used(self, step: _Step) -> None:
        """A batch that another rank recognised is over here too."""
        while self._tickets and self._tickets[0].number <= step.consumed:
            self._tickets.popleft()
        if self._tickets:
            self._tickets[0].fetched = step.opened

    def _backward(self, step: Step) -> None:
        assert isinstance(step, _Step)
        grads = step.all_grads()
        step.grads.clear()
        tag, urgent_tag = self._tag(), self._num_jobs
        step.update = self._urgent.submit(lambda: self._update(step, grads, urgent_tag), "a batch's colliding rows")
        self._bulk.submit(lambda: self._defer(step, tag), "a batch's exclusive gradients")

    def _wait(self, job: Job[T]) -> T:
        started = time.perf_counter()
        try:
            return job.wait(self.timeout_s)
        finally:
            self._exposed_s += time.perf_counter() - started

    def _tag(self) -> int:
        self._num_jobs += 1
        return self._num_jobs

    # Run by bulk.

    def _fetch_first(self, ticket: Ticket) -> None:
        route = ticket.routed.wait(self.timeout_s)
        ticket.exclusive_rows = route.to_askers(self.bulk_peers, self.store.read(route.slots))

    def _open(
        self,
        step: _Step,
        before: Job[None] | None,
        waiting: list[Ticket],
        keys: Tensor,
        bad: BadId | None,
        tag: int,
    ) -> tuple[Route, Tensor] | None:
        self._settle(before)
        used = _MISS if step.ticket is None else step.ticket.number
        theirs = self._agree(self.bulk_peers, tag, used)
        step.consumed = max(theirs)
        step.missed = len(set(theirs)) > 1 or step.consumed == _MISS
        step.next = next((t for t in waiting if t.number > step.consumed), None)
        if step.next is not None:
            step.next.previous = step
        if step.missed:
            self._collide_all(step)
            mine = keys if step.ticket is None else torch.cat(step.ticket.keys)
            return self._fetch(mine, bad, tag)
        assert step.ticket is not None
        route = step.ticket.routed.wait(self.timeout_s)
        if step.next is None:
            step.collides = torch.zeros_like(route.owner, dtype=torch.bool)
            step.asked_collides = torch.zeros_like(route.slots, dtype=torch.bool)
        else:
            self._split(step, route, step.next)
        return None

    def _split(self, step: _Step, route: Route, after: Ticket) -> None:
        """The owner tells, for all ranks together, which rows two batches share; and sends what the later has alone."""
        later = after.routed.wait(self.timeout_s)
        step.asked_collides = torch.isin(route.slots, later.slots)
        after.asked_collides = torch.isin(later.slots, route.slots)
        step.collides = route.to_askers(self.bulk_peers, step.asked_collides.byte()).bool()
        after.collides = later.to_askers(self.bulk_peers, after.asked_collides.byte()).bool()
        alone = ~after.asked_collides
        rows = self.store.read(later.slots[alone])
        after.exclusive_rows = later.to_askers(self.bulk_peers, rows, of=alone, wanted=~after.collides)

    def _collide_all(self, step: _Step) -> None:
        step.missed = True
        if step.next is not None:
            route = step.next.routed.wait(self.timeout_s)
            step.next.collides = torch.ones_like(route.owner, dtype=torch.bool)
            step.next.asked_collides = torch.ones_like(route.slots, dtype=torch.bool)
            step.next.exclusive_rows = self.store.weight.new_empty(0, self.store.dim)

    def _fetch(self, keys: Tensor, bad: BadId | None, tag: int) -> tuple[Route, Tensor]:
        route = exchange_ids(self.bulk_peers, self.store.shards, keys, self.table_names, tag=tag, bad=bad)
        return route, route.to_askers(self.bulk_peers, self.store.read(route.slots))

    def _fetch_extra(self, step: _Step, keys: Tensor, bad: BadId | None, tag: int) -> tuple[Route, Tensor]:
        step.opened.wait(self.timeout_s)
        self._collide_all(step)
        return self._fetch(keys, bad, tag)

    def _fetch_now(self, before: Job[None] | None, keys: Tensor, bad: BadId | None, tag: int) -> tuple[Route, Tensor]:
        self._settle(before)
        return self._fetch(keys, bad, tag)

    def _settle(self, before: Job[None] | None) -> None:
        """Applies the deferred gradients, once the urgent ones of their step are."""
        if before is not None:
            before.wait(self.timeout_s)
        if self._pending is not None:
            slots, grads, number = self._pending
            self._pending = None
            self.store.update_(slots, grads, number)

    def _defer(self, step: _Step, tag: int) -> None:
        step.update.wait(self.timeout_s)
        if step.deferred is None:
            return
        route, sums, has_grads, number = step.deferred
        step.deferred = None
        alone = ~step.asked_collides
        grads = route.to_owners(self.bulk_peers, sums[~step.collides], of=alone, sent=~step.collides)
        from_grads = has_grads[route.asker[alone]]
        self._pending = (route.slots[alone][from_grads], grads[from_grads], number)

    # Run by urgent.

    def _update(self, step: _Step, grads: Tensor | None, tag: int) -> None:
        step.opened.wait(self.timeout_s)
        peers, store = self.urgent_peers, self.store
        has_grads = torch.tensor(self._agree(peers, tag, int(grads is not None)), dtype=torch.bool)
        if has_grads.any():
            if step.missed:
                route = exchange_ids(peers, store.shards, step.all_keys(), self.table_names, tag=tag)
                collides, asked = (
                    torch.ones_like(route.owner, dtype=torch.bool),
                    torch.ones_like(route.slots, dtype=torch.bool),
                )
            else:
                assert step.ticket is not None
                route = step.ticket.routed.wait(self.timeout_s)
                collides, asked = step.collides, step.asked_collides
            has_grads = has_grads.to(route.asker.device)
            if grads is None:
                sums = store.weight.new_zeros(len(route.owner), store.dim)
            else:
                sums = route.sum_grads(grads) / self.divide_by
            received = route.to_owners(peers, sums[collides], of=asked, sent=collides)
            from_grads = has_grads[route.asker[asked]]
            store.num_steps += 1
            store.update_(route.slots[asked][from_grads], received[from_grads], store.num_steps)
            if not step.missed:
                step.deferred = (route, sums, has_grads, store.num_steps)
        if step.next is not None:
            later = step.next.routed.wait(self.timeout_s)
            rows = store.read(later.slots[step.next.asked_collides])
            step.next.colliding_rows = later.to_askers(
                peers, rows, of=step.next.asked_collides, wanted=step.next.collides
            )
        step.keys.clear()
        step.ticket = step.next = None

    @staticmethod
    def _agree(peers: Peers, tag: int, value: int) -> list[int]:
        """Each rank's `value`, after a check that all ranks are at the same exchange."""
        theirs = peers.all_gather(torch.tensor([tag, value])).tolist()
        for rank, (their_tag, _) in enumerate(theirs):
            if their_tag != tag:
                raise RanksDisagree(
                    f"every rank must look up, prefetch and flush in the same order: this rank is at exchange {tag}, "
                    f"rank {rank} at {their_tag}; see that no rank skips a batch or a call"
                )
        return [value for _, value in theirs]
