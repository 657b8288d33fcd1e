"""Which step each lookup belongs to: announced batches in a queue, and the one step that is open.

Every rank takes the same steps in the same order, also one that does not call the module in a step: its share of that
step is closed without gradients as soon as it is clear that no backward will come.
"""

import warnings
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from torch import Tensor

from fs_embed.route import Keys
from fs_embed.step import Gradients, Step, are_finite
from fs_embed.ticket import Lookup, Ticket


class Engine(Protocol):
    """One store's exchanges; see `PrioritizedEngine`. A part is one step's share in the store."""

    def new_part(self, keys: Sequence[Keys] | None) -> Any: ...
    def announce(self, part: Any) -> None: ...
    def begin(self, part: Any, hit: bool, after: Any) -> None: ...
    def look_up(self, part: Any, keys: Keys, place: int | None) -> tuple[Tensor, Tensor]: ...
    def serve(self) -> bool:
        """One round of answers to ranks that still look up in the step; False once none does."""
        ...

    def finish(self, part: Any, gradients: Gradients | None, finite: Tensor | None, divide_by: float) -> None: ...

    def has_skipped(self) -> bool:
        """Whether some rank's gradients in the last finished step were not finite, so that no rank updated."""
        ...

    def meet(self, num_closed: int) -> int:
        """Collective: how many steps others have closed, or wait to close, that this rank has not."""
        ...

    def evaluate(self, keys: Keys) -> Tensor: ...


class Schedule:
    """Turns calls of a module into steps of its stores."""

    def __init__(self, engines: Sequence[Engine], divide_by: Callable[[], float], *, looks_ahead: bool) -> None:
        self._engines, self._divide_by, self._looks_ahead = engines, divide_by, looks_ahead
        self._waiting: deque[Ticket | None] = deque()  # announced, not begun; None: no batch follows
        self._written_off: deque[Ticket] = deque(maxlen=8)
        self._step: Step | None = None
        self._parts: list[Any] = []  # of the step
        self._is_over = False  # the loop announced its end
        self._wants_announcement = True  # the newest step began without knowing its successor
        self._most_waiting = 2
        """A loop that announces n batches before it trains on the first never has more than n waiting: one more shows
        that the oldest was not looked up. fs_data and `lookahead` have 2; loops with more are found out by the first
        batch that turns up after it was written off."""
        self._num_closed = 0
        self.hits = self.misses = self.absences = 0

    def prefetch(self, lookups: Sequence[Lookup] | None) -> None:
        if lookups is None:
            if self._is_over:  # said twice: the loop has ended
                self.close_all()
            else:
                self._waiting.append(None)
            self._is_over = True
        else:
            self._is_over = False
            self._waiting.append(self._with_parts(Ticket(list(lookups))))
        self._announce()
        while len(self._waiting) > self._most_waiting:
            self._close_step()
            self._write_off()

    def look_up(self, lookup: Lookup) -> list[Tensor]:
        """The rows of one call, for each store."""
        step, place = self._step_of(lookup)
        found = [
            engine.look_up(part, keys, place)
            for engine, part, keys in zip(self._engines, self._parts, lookup.keys, strict=True)
        ]
        rows, inverse = [f[0] for f in found], [f[1] for f in found]
        return step.add(lookup, -1 if place is None else place, rows, inverse)

    def evaluate(self, keys: Sequence[Keys]) -> list[Tensor]:
        """Rows as they are after all steps, of each store; collective, and belongs to no step."""
        self.meet()
        return [engine.evaluate(k) for engine, k in zip(self._engines, keys, strict=True)]

    def meet(self) -> None:
        """Collective: closes this rank's share of steps that it left out while others took them.

        A rank cannot know of such a step, and the others wait for its share before they get here.
        """
        while num_left_out := max([engine.meet(self._num_closed) for engine in self._engines]):
            for _ in range(num_left_out):
                self._leave_out()
            if self._looks_ahead:
                return  # one count told all; without looking ahead, ranks meet once none is in a step

    def close_all(self) -> None:
        """Closes what is open and all batches that were announced and not looked up."""
        self._close_step()
        while self._waiting:
            self._write_off()

    def forget(self) -> None:
        """The tables were overwritten: what was fetched for announced batches must not be used."""
        self._close_step()
        for ticket in self._waiting:
            if ticket is not None:
                ticket.is_stale = True

    def _step_of(self, lookup: Lookup) -> tuple[Step, int | None]:
        step = self._step
        if step is not None and not step.started and not step.closed:
            places = [] if step.ticket is None else step.ticket.places_of(lookup)
            used = {call.place for call in step.calls}
            unused = [place for place in places if place not in used]
            if unused:
                return step, unused[0]
            if self._find(lookup) is None:  # else its backward never came: the announced batch is another step
                if places:
                    return step, places[0]
                if step.ticket is None:
                    return step, None
        index = self._find(lookup)
        if index is not None:
            self._close_step()
            for _ in range(index):
                self._write_off()
            ticket = self._waiting.popleft()
            assert ticket is not None
            self.hits += 1
            return self._begin(ticket, ticket.parts), ticket.places_of(lookup)[0]
        return self._miss(lookup), None

    def _find(self, lookup: Lookup) -> int | None:
        """Which waiting batch this lookup belongs to: by value only the next one, others look too much alike."""
        front = True
        for index, ticket in enumerate(self._waiting):
            if ticket is None or ticket.is_stale:
                continue
            if (front or not lookup.is_empty) and ticket.places_of(lookup, by_value=front):
                return index
            front = False
        return None

    def _miss(self, lookup: Lookup) -> Step:
        self._close_step()
        self.misses += 1
        if self._looks_ahead and self.misses == 1:
            warnings.warn(
                "a batch reached prioritized tables without having been prefetched, as these very id tensors: this "
                "step's exchange is not overlapped. Results are exact; stats()['misses'] counts such steps",
                stacklevel=5,
            )
        if any(t.places_of(lookup, by_value=False) for t in self._written_off) and not lookup.is_empty:
            self._most_waiting += 1  # it was still to come; the batch that waits now is a later one
            for ticket in self._waiting:
                if ticket is not None:
                    self._with_parts(ticket)  # the rows that came for it will be old
        elif self._waiting and self._waiting[0] is not None:
            self._waiting.popleft()  # this batch, with other ids than announced
        return self._begin(None, [engine.new_part(None) for engine in self._engines])

    def _begin(self, ticket: Ticket | None, parts: Sequence[Any]) -> Step:
        after = self._waiting[0] if self._waiting else None
        self._step, self._parts = Step(ticket, self._finish), list(parts)
        for s, engine in enumerate(self._engines):
            engine.begin(parts[s], ticket is not None, None if after is None else after.parts[s])
        self._wants_announcement = after is None
        self._announce()
        return self._step

    def _announce(self) -> None:
        while self._waiting and self._waiting[0] is None:
            self._waiting.popleft()
        if self._waiting and self._wants_announcement:
            self._wants_announcement = False
            ticket = self._waiting[0]
            assert ticket is not None
            for engine, part in zip(self._engines, ticket.parts, strict=True):
                engine.announce(part)

    def _write_off(self) -> None:
        """This rank's share of a step whose batch was announced and not looked up."""
        ticket = self._waiting.popleft()
        if ticket is None:
            return
        self.absences += 1
        self._written_off.append(ticket)
        self._begin(ticket, ticket.parts)
        self._close_step()

    def _leave_out(self) -> None:
        if self._step is not None and not self._step.closed:
            self._close_step()
        elif self._waiting and self._waiting[0] is not None:
            self._write_off()
        else:
            self.absences += 1
            self._begin(None, [engine.new_part(None) for engine in self._engines])
            self._close_step()

    def _close_step(self) -> None:
        if self._step is not None:
            self._step.close()

    def _finish(self, step: Step) -> None:
        divide_by = self._divide_by()
        self._num_closed += 1
        while any([engine.serve() for engine in self._engines]):
            pass
        gradients = [step.gradients(s, copied=self._looks_ahead) for s in range(len(self._engines))]
        finite = are_finite(gradients)
        for engine, part, mine in zip(self._engines, self._parts, gradients, strict=True):
            engine.finish(part, mine, finite, divide_by)

    def _with_parts(self, ticket: Ticket) -> Ticket:
        ticket.parts = [
            engine.new_part([lookup.keys[s] for lookup in ticket.lookups]) for s, engine in enumerate(self._engines)
        ]
        return ticket
