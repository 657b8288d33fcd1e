"""A user's own partition function, held to what the exchange needs."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from fs_data.plan import Assignment, RuntimeInfo, WorldBatch, check_assignment


@dataclass(frozen=True)
class Custom:
    """`function(world, runtime)`, checked after every call; what else it has (its state, say) is passed through."""

    function: Callable[[WorldBatch, RuntimeInfo], Any]

    def __call__(self, world: WorldBatch, runtime: RuntimeInfo) -> Assignment:
        name = getattr(self.function, "__qualname__", type(self.function).__qualname__)
        return check_assignment(self.function(world, runtime), world, f"the partition function {name}")

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "function":
            raise AttributeError(name)
        return getattr(self.function, name)
