"""One training step of one store: what its forward looked up, and the gradients that come back for it.

All lookups between two backwards make one step, and one update: SASRec looks its item table up three times a forward.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Variable
from torch.autograd.function import once_differentiable

from fs_embed.errors import ClosedStep


class Step:
    """Collects lookups, then their gradients; calls `on_grads` once, when the backward is done with all of them."""

    def __init__(self, on_grads: "Callable[[Step], None]") -> None:
        self.keys: list[Tensor] = []  # (n,) of each lookup, in call order
        self.grads: list[Tensor | None] = []  # (n, D)
        self.started = False
        """A backward has reached the step: the next lookup belongs to another one."""
        self.closed = False
        self._on_grads = on_grads

    def look_up(self, keys: Tensor, rows: Tensor, inverse: Tensor) -> Tensor:
        """`rows[inverse]`, whose gradient comes back to this step."""
        self.keys.append(keys)
        self.grads.append(None)
        anchor = torch.zeros((), dtype=rows.dtype, device=rows.device, requires_grad=True)
        return _Expand.apply(anchor, rows, inverse, self, len(self.keys) - 1)

    def receive(self, lookup: int, grad: Tensor) -> None:
        if self.closed:
            raise ClosedStep(
                "each forward of prioritized tables takes one backward, before the next forward: this one came after "
                "its step had ended; add the losses up and call backward once"
            )
        if not self.started:
            self.started = True
            # Lookups that the loss does not depend on get no gradient: the end of the backward is the end of waiting.
            Variable._execution_engine.queue_callback(self.close)  # pyright: ignore
        self.grads[lookup] = grad
        if all(g is not None for g in self.grads):
            self.close()

    def close(self) -> None:
        """Ends the step with the gradients that came; once."""
        if not self.closed:
            self.closed = True
            self._on_grads(self)

    def all_keys(self) -> Tensor:
        return torch.cat(self.keys)

    def all_grads(self) -> Tensor | None:
        """`(Σn, D)` in call order, zeros for lookups that got none; None where no lookup got any."""
        some = next((g for g in self.grads if g is not None), None)
        if some is None:
            return None
        return torch.cat(
            [
                g if g is not None else some.new_zeros(len(k), some.shape[1])
                for k, g in zip(self.keys, self.grads, strict=True)
            ]
        )


class _Expand(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: Tensor, rows: Tensor, inverse: Tensor, step: Step, lookup: int) -> Tensor:
        ctx.step, ctx.lookup = step, lookup
        return rows.index_select(0, inverse)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.step.receive(ctx.lookup, grad.contiguous())
        return None, None, None, None, None
