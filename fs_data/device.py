"""Balanced batches onto the training device: pinned, on a stream of their own, ordered before the model's kernels."""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch

from fs_data.tree import build_tree, fill, tensor_in, walk


@dataclass(frozen=True)
class Moved:
    """A batch whose copies, and kernels, may still be under way."""

    batch: Any
    ready: torch.cuda.Event | None = None

    def take(self) -> Any:
        """The batch, for use on the current stream of the calling thread; does not wait on the host."""
        if self.ready is not None:
            stream = torch.cuda.current_stream(_cuda_device_of(self.batch))
            stream.wait_event(self.ready)
            # The memory was allocated for the side stream: it must not be reused there while the model still reads it.
            map_parts(self.batch, lambda part: _record(part, stream))
        return self.batch


class Lane:
    """Where balancing runs: a CUDA stream of its own for batches that live on a GPU or go there, else the host."""

    def __init__(self, device: torch.device | None) -> None:
        self.device = device
        self._stream: torch.cuda.Stream | None = None

    def enter(self, batch: Any, drawn: torch.cuda.Event | None) -> contextlib.AbstractContextManager[Any]:
        """The context in which to balance `batch`, which the wrapped loader finished at the event `drawn`."""
        device = self.device if self.device is not None and self.device.type == "cuda" else _cuda_device_of(batch)
        if device is None:
            return contextlib.nullcontext()
        if self._stream is None:
            self._stream = torch.cuda.Stream(device)
        if drawn is not None:
            self._stream.wait_event(drawn)
        return torch.cuda.stream(self._stream)

    @property
    def pins(self) -> bool:
        """Whether host memory that goes to the device should be pinned, since only then copies overlap."""
        return self.device is not None and self.device.type == "cuda"

    def move(self, batch: Any) -> Moved:
        """Starts the copy of `batch` to the device; within `enter`."""
        if self.device is not None:
            if self.pins:
                batch = map_parts(batch, _pin)
            batch = map_parts(batch, lambda part: _to(part, cast("torch.device", self.device)))
        if self._stream is None or _cuda_device_of(batch) is None:
            return Moved(batch)
        ready = torch.cuda.Event()
        ready.record(self._stream)
        return Moved(batch, ready)


def drawn_event(batch: Any) -> torch.cuda.Event | None:
    """Marks on the current stream that a batch on a GPU is complete; None for batches on the host."""
    device = _cuda_device_of(batch)
    if device is None:
        return None
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(device))
    return event


def map_parts(batch: Any, fn: Callable[[Any], Any]) -> Any:
    """`batch` with `fn` applied to its tensors and to whatever has a `to` of its own, such as custom classes."""
    if hasattr(batch, "to"):
        return fn(batch)
    parts: dict[str, Any] = {}

    def is_part(path: str, value: object) -> bool:
        if hasattr(value, "to"):
            parts[path] = value
        return path in parts

    tree = build_tree(batch, is_part)
    return fill(tree, {path: fn(part) for path, part in parts.items()}, 0)


def _to(part: Any, device: torch.device) -> Any:
    try:
        return part.to(device, non_blocking=True)
    except TypeError:  # a class of the user's own may only know to(device)
        return part.to(device)


def _pin(part: Any) -> Any:
    return part.pin_memory() if hasattr(part, "pin_memory") else part


def _record(part: Any, stream: torch.cuda.Stream) -> Any:
    if hasattr(part, "record_stream"):
        part.record_stream(stream)
    return part


def _cuda_device_of(batch: Any) -> torch.device | None:
    """The GPU that a batch lies on, told by its first tensor on one."""
    if not torch.cuda.is_available():
        return None
    for _, value in walk({"batch": batch}):
        tensor = tensor_in(value)
        if tensor is not None and tensor.is_cuda:
            return tensor.device
    return None
