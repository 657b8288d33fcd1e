"""Partitioners: from all ranks' samples to who trains on which.

Each is a function of `WorldBatch` and `RuntimeInfo`, pure and the same on every rank; see `fs_data.plan`.
"""

from collections.abc import Callable

from fs_data.partition.fbs import fbs
from fs_data.partition.few_moves import FewMoves
from fs_data.partition.identity import identity
from fs_data.plan import Assignment, RuntimeInfo, WorldBatch

Partitioner = Callable[[WorldBatch, RuntimeInfo], Assignment]

__all__ = ["FewMoves", "Partitioner", "fbs", "identity", "make"]

_NAMES: dict[str, Callable[[], Partitioner]] = {
    "few_moves": FewMoves,
    "fbs": lambda: fbs,
    "identity": lambda: identity,
}


def make(name: str) -> Partitioner:
    """The partitioner of this name, with its default settings."""
    if name not in _NAMES:
        raise ValueError(f"partitioner must be one of {sorted(_NAMES)} or a function, got {name!r}")
    return _NAMES[name]()
