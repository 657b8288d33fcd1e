"""The loss weights of a batch that was handed out, found again by the batch itself."""

import weakref
from collections import deque
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from fs_data.exchange import Balanced
from fs_data.schema import BoundSchema

_REMEMBERED = 4  # pipelines hold up to three


@dataclass(frozen=True)
class _Given:
    tensor: "weakref.ref[Tensor | NDArray[Any]]"
    """One of the batch's; it is the same in a container rebuilt around it."""
    weights: dict[str, NDArray[np.float64]]
    """`(B,)` by task."""
    totals: dict[str, float]
    """Sums over all ranks' samples by task."""


class GivenBatches:
    """The batches handed out last; none is kept alive."""

    def __init__(self) -> None:
        self._last: deque[_Given] = deque(maxlen=_REMEMBERED)

    def add(self, batch: Any, balanced: Balanced, schema: BoundSchema) -> None:
        tensor = schema.tensor_of(batch)
        if tensor is not None:
            self._last.append(_Given(weakref.ref(tensor), balanced.weights, balanced.total_weights))

    def weights(self, batch: Any, task: str, schema: BoundSchema | None) -> tuple[NDArray[np.float64], float]:
        """`(B,)`, and the sum over all ranks."""
        if schema is None:
            raise ValueError("the batch must be one that this loader gave, and it has given none yet")
        tensor = schema.tensor_of(batch)
        if tensor is None:
            raise ValueError("the batch must have a tensor or an array of its samples, by which it is known again")
        given = next((g for g in reversed(self._last) if g.tensor() is tensor), None)
        if given is None:
            raise ValueError(
                f"the batch must be one of the last {_REMEMBERED} that this loader gave; a copy on another device is "
                "not: ask before moving it, or let the loader do so (device=…)"
            )
        if task not in given.weights:
            raise ValueError(f"task must be one of {list(given.weights)}, got {task!r}")
        return given.weights[task], given.totals[task]
