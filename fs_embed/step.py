"""One training step of a module: the lookups of its forward, and the gradients that come back for them.

All lookups between two backwards make one step, and one update: SASRec looks its item table up three times a forward.

Legend: n ids of a lookup in one store, D features.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Variable
from torch.autograd.function import once_differentiable

from fs_embed.errors import ClosedStep
from fs_embed.ticket import Lookup, Ticket


@dataclass(slots=True)
class Call:
    """One lookup and what came back for it."""

    lookup: Lookup
    place: int
    """Its place in the ticket, -1 where it was not announced."""
    grads: list[Tensor | None]
    """`(n, D)` for each store."""


class Step:
    """Collects lookups, then their gradients; calls `on_close` once: when all came, or the backward is over."""

    def __init__(self, ticket: Ticket | None, on_close: "Callable[[Step], None]") -> None:
        self.ticket = ticket
        """The announced batch that this is, None for one that was not."""
        self.calls: list[Call] = []
        self.started = False
        """A backward has reached the step: the next lookup belongs to another one."""
        self.closed = False
        self._on_close = on_close

    def add(self, lookup: Lookup, place: int, rows: Sequence[Tensor], inverse: Sequence[Tensor]) -> list[Tensor]:
        """`rows[inverse]` of each store, whose gradients come back to this step."""
        self.calls.append(Call(lookup, place, [None] * len(rows)))
        number = len(self.calls) - 1
        if not torch.is_grad_enabled():
            return [r.index_select(0, i) for r, i in zip(rows, inverse, strict=True)]
        anchors = [torch.zeros((), dtype=r.dtype, device=r.device, requires_grad=True) for r in rows]
        return [
            _Expand.apply(anchor, r, i, self, number, store)
            for store, (anchor, r, i) in enumerate(zip(anchors, rows, inverse, strict=True))
        ]

    def receive(self, call: int, store: int, grad: Tensor) -> None:
        if self.closed:
            raise ClosedStep(
                "each forward of prioritized tables takes one backward, before the next forward: this one came after "
                "its step had ended; add the losses up and call backward once"
            )
        if not self.started:
            self.started = True
            # Lookups that the loss does not depend on get no gradient: the end of the backward is the end of waiting.
            Variable._execution_engine.queue_callback(self.close)  # pyright: ignore
        self.calls[call].grads[store] = grad
        if all(g is not None for c in self.calls for g in c.grads):
            self.close()

    def close(self) -> None:
        """Ends the step with the gradients that came; once."""
        if not self.closed:
            self.closed = True
            self._on_close(self)
            self.calls.clear()

    def gradients(self, store: int, *, copied: bool) -> "Gradients | None":
        """What the store gets, None where no gradient came for it; `copied` for a store that reads it later."""
        came = [(call, grad) for call in self.calls if (grad := call.grads[store]) is not None]
        if not came:
            return None
        keys = [call.lookup.keys[store].values for call, _ in came]
        as_announced = self.ticket is not None and [c.place for c, _ in came] == [*range(len(self.ticket.lookups))]
        return Gradients(_joined(keys), _joined([grad for _, grad in came], copied), as_announced)


@dataclass(frozen=True, slots=True)
class Gradients:
    keys: Tensor
    """`(Σn,)` of the lookups that the loss depends on, in call order: the rows of others are left alone."""
    values: Tensor
    """`(Σn, D)`."""
    as_announced: bool
    """The lookups are those of the ticket, each once and in its order."""


def are_finite(gradients: "Sequence[Gradients | None]") -> Tensor | None:
    """`()` bool: no value of any is infinite or not a number; None where there is none. Reads nothing on the host.

    One pass over each: both kinds of values show in the smallest or the largest.
    """
    extremes = [torch.stack(torch.aminmax(g.values)) for g in gradients if g is not None and g.values.numel()]
    if not extremes:
        return None
    return torch.stack([e.isfinite().all() for e in extremes]).all()


def _joined(parts: Sequence[Tensor], copied: bool = False) -> Tensor:
    """`copied` if the caller of backward, who may have given this very tensor, must be free to write on it."""
    return parts[0] if len(parts) == 1 and not copied else torch.cat(list(parts))


class _Expand(torch.autograd.Function):
    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, anchor: Tensor, rows: Tensor, inverse: Tensor, step: Step, call: int, store: int
    ) -> Tensor:
        ctx.step, ctx.call, ctx.store = step, call, store
        return rows.index_select(0, inverse)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.step.receive(ctx.call, ctx.store, grad.contiguous())
        return None, None, None, None, None, None
