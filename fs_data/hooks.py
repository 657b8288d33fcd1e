"""Ties the stages of balancing to a model's step, as the paper does (Figure 4), and times each rank's own compute.

Without hooks the background thread runs each stage as soon as it can. Attached, a stage starts where the step leaves
the network free: stage 1 once the embeddings have arrived, stage 2 after forward, stage 3 after backward has begun; and
`next()` lets run whatever no hook did.
"""

import threading
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from fs_data.feeds import consumers_of
from fs_data.tree import walk

_ALL = 3


class Pace:
    """How many of a batch's three stages may start. Open unless hooks are attached."""

    def __init__(self) -> None:
        self.attached = False
        self._allowed = _ALL
        self._changed = threading.Condition()

    def hold(self) -> None:
        """A batch has been handed out: its step's hooks decide when the stages of the next exchange start."""
        with self._changed:
            self._allowed = 0 if self.attached else _ALL

    def allow(self, num_stages: int = _ALL) -> None:
        with self._changed:
            self._allowed = max(self._allowed, num_stages)
            self._changed.notify_all()

    def wait_for(self, stage: int) -> None:
        # Ends: `next()`, `stop()` and `close()` allow all stages.
        with self._changed:
            self._changed.wait_for(lambda: self._allowed >= stage)


class ComputeTimes:
    """Seconds that this rank computed in each step, waiting for others left out: only there a straggler shows."""

    def __init__(self) -> None:
        self._step = -1
        self._start: Any = None
        self._spans: dict[int, list[Callable[[], float | None]]] = {}

    def begin_step(self, step: int) -> None:
        """Steps older than the four latest are forgotten."""
        self._step = step
        for old in [s for s in self._spans if s < step - 4]:
            del self._spans[old]

    def start(self, device: torch.device) -> None:
        self._start = _mark(device)

    def stop(self, device: torch.device) -> None:
        if self._start is not None:
            self.add(_span(self._start, _mark(device)))
            self._start = None

    def add(self, span: Callable[[], float | None]) -> None:
        self._spans.setdefault(self._step, []).append(span)

    def of(self, step: int) -> int:
        """Nanoseconds of `step`; −1 where unknown, or not yet known on the device."""
        seconds = [span() for span in self._spans.get(step, [])]
        known = [s for s in seconds if s is not None]
        return round(sum(known) * 1e9) if known and len(known) == len(seconds) else -1


class Attachment:
    """The hooks on one model and its optimizer."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, pace: Pace, times: ComputeTimes) -> None:
        self.pace, self.times = pace, times
        self.optimizer_steps = 0
        self._device = next((p.device for p in model.parameters()), torch.device("cpu"))
        embeddings = list(consumers_of(model).values())
        self._handles: list[RemovableHandle] = [
            model.register_forward_pre_hook(self._before_forward),
            model.register_forward_hook(self._after_forward),
            optimizer.register_step_post_hook(self._after_optimizer),
        ]
        self._handles += [
            m.register_forward_hook(self._after_embedding) for m in embeddings if isinstance(m, nn.Module)
        ]
        pace.attached = True

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self.pace.attached = False
        self.pace.allow()

    def _before_forward(self, module: nn.Module, inputs: Any) -> None:
        if module.training:
            self.times.start(self._device)

    def _after_embedding(self, module: nn.Module, inputs: Any, output: Any) -> None:
        if module.training:
            self.times.start(self._device)  # the wait for rows is over; the last lookup's end counts
            self.pace.allow(1)

    def _after_forward(self, module: nn.Module, inputs: Any, output: Any) -> None:
        if not module.training:
            return
        self.times.stop(self._device)
        self.pace.allow(2)
        grad = next((v for _, v in walk({"output": output}) if isinstance(v, Tensor) and v.requires_grad), None)
        if grad is not None:
            grad.register_hook(self._in_backward)

    def _in_backward(self, grad: Tensor) -> None:
        self.pace.allow(_ALL)

    def _after_optimizer(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        self.optimizer_steps += 1
        self.pace.allow(_ALL)


def _mark(device: torch.device) -> Any:
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _span(start: Any, stop: Any) -> Callable[[], float | None]:
    if isinstance(start, float):
        return lambda: stop - start
    return lambda: start.elapsed_time(stop) / 1000 if stop.query() else None
