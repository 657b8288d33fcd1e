"""The loss weights of a batch that was handed out, found again by the batch itself."""

import weakref
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from fs_data.exchange import Balanced
from fs_data.schema import BoundSchema


@dataclass(frozen=True)
class Given:
    """Holds no batch: one of its tensors is remembered weakly, and is the same in a container rebuilt around it."""

    tensor: "weakref.ref[Tensor] | None"
    weights: dict[str, NDArray[np.float64]]
    """`(B,)` by task."""
    totals: dict[str, float]
    """Sums over all ranks' samples by task."""

    @classmethod
    def of(cls, batch: Any, balanced: Balanced, schema: BoundSchema) -> "Given":
        tensor = schema.tensor_of(batch)
        return cls(None if tensor is None else weakref.ref(tensor), balanced.weights, balanced.total_weights)

    def is_of(self, batch: Any, schema: BoundSchema) -> bool:
        return self.tensor is not None and self.tensor() is not None and self.tensor() is schema.tensor_of(batch)
