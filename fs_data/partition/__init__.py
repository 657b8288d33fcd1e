"""Who trains on which sample: partition functions by name, and the figures by which plans are judged.

```
identity    as dealt
fbs         the paper's zig-zag over samples sorted by cost: equal counts
vbs         the paper's segments of equal weight over samples sorted by cost: similar samples together, counts differ
lpt         longest first onto the least loaded rank: the most even, moves nearly everything
few_moves   swaps pairs until the spread is under a tolerance: moves a few per cent (the default)
```
"""

from collections.abc import Callable
from typing import Any, Protocol

from fs_data.partition.caps import Capped
from fs_data.partition.custom import Custom
from fs_data.partition.fbs import fbs
from fs_data.partition.few_moves import FewMoves
from fs_data.partition.identity import identity
from fs_data.partition.lpt import lpt
from fs_data.partition.report import PlanReport, report
from fs_data.partition.vbs import Vbs
from fs_data.plan import Assignment, RuntimeInfo, WorldBatch

__all__ = [
    "NAMES",
    "Capped",
    "Custom",
    "FewMoves",
    "Partitioner",
    "PlanReport",
    "Vbs",
    "fbs",
    "identity",
    "lpt",
    "make",
    "report",
]


class Partitioner(Protocol):
    """A pure function: equal inputs give equal plans on every rank and processor.

    One that learns from step to step (`Vbs`) also has `state_dict`, `load_state_dict`, `decision` and `replay`.
    """

    def __call__(self, world: WorldBatch, runtime: RuntimeInfo) -> Assignment:
        """`(N,)` int64: the rank of each sample; where N is at least R, every rank gets one."""
        ...


_MAKERS: dict[str, Callable[..., Partitioner]] = {
    "few_moves": FewMoves,
    "lpt": lambda: lpt,
    "fbs": lambda: fbs,
    "vbs": Vbs,
    "identity": lambda: identity,
}
NAMES = tuple(_MAKERS)


def make(
    partitioner: str | Partitioner, *, max_tokens: int | None = None, max_samples: int | None = None, **settings: Any
) -> Partitioner:
    """A partitioner by name, or a user's function with its results checked; capped where caps are given.

    Args:
        partitioner: One of `NAMES`, or a function from `WorldBatch` and `RuntimeInfo` to ranks.
        max_tokens: Most tokens that a rank may get.
        max_samples: Most samples that a rank may get.
        settings: Of the named partitioner, such as `tolerance` of few_moves.
    """
    if isinstance(partitioner, str):
        if partitioner not in _MAKERS:
            raise ValueError(f"partitioner must be one of {sorted(NAMES)} or a function, got {partitioner!r}")
        made = _MAKERS[partitioner](**settings)
    elif not callable(partitioner):
        raise TypeError(f"partitioner must be one of {sorted(NAMES)} or a function, got {partitioner!r}")
    elif settings:
        raise ValueError(f"settings go with a partitioner's name, got {sorted(settings)} beside {partitioner!r}")
    else:
        ours = partitioner in (fbs, identity, lpt) or isinstance(partitioner, (Capped, Custom, FewMoves, Vbs))
        made = partitioner if ours else Custom(partitioner)
    if max_tokens is None and max_samples is None:
        return made
    return Capped(made, max_tokens=max_tokens, max_samples=max_samples)
