"""Tells embedding modules which ids they will look up next.

The modules are known by two methods, `prefetch` and `flush`; nothing is imported for them.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, cast, runtime_checkable

from torch import nn

from fs_data.tree import type_name, walk

Lookups = Callable[[Any], Sequence[Any]]
"""The ids that a module looks up in one forward of a batch, in call order."""


@runtime_checkable
class IdConsumer(Protocol):
    """An embedding module that can look ahead."""

    def prefetch(self, ids: Sequence[Any] | None) -> None:
        """The lookups of the next forward that has none yet, in call order; None when no forward follows."""
        ...

    def flush(self) -> None:
        """Finishes what is under way; what was prefetched is forgotten."""
        ...


class Feeds:
    """The consumers in one model, and what each of them looks up."""

    def __init__(self, model: nn.Module, lookups: Mapping[str, Lookups] | None) -> None:
        consumers = consumers_of(model)
        if lookups is None:
            self.lookups = {n: _by_feature_names(n, m) for n, m in consumers.items()}
        else:
            unknown = sorted(set(lookups) - set(consumers))
            missing = sorted(set(consumers) - set(lookups))
            if unknown:
                raise ValueError(
                    f"modules {unknown} have no prefetch() and flush(); those that do are {sorted(consumers)}"
                )
            if missing:
                raise ValueError(
                    f"modules {missing} look ids up too; say which, as in {{'{missing[0]}': lambda b: [b['ids']]}}"
                )
            self.lookups = dict(lookups)
        self.consumers = consumers

    def prefetch(self, batch: Any) -> None:
        """Hands the ids of `batch` to each module; None says that no batch follows."""
        for name, consumer in self.consumers.items():
            consumer.prefetch(None if batch is None else list(self.lookups[name](batch)))

    def flush(self) -> None:
        for consumer in self.consumers.values():
            consumer.flush()


def consumers_of(model: nn.Module) -> dict[str, IdConsumer]:
    """The modules of `model` that look ids up ahead, by their names in `named_modules`; wrappers are looked through."""
    inner = model
    while isinstance(getattr(inner, "module", None), nn.Module):  # DDP and others like it
        inner = cast("nn.Module", inner.module)
    found = {n: m for n, m in inner.named_modules() if isinstance(m, IdConsumer)}
    # A consumer within a consumer is the outer one's business.
    return {n: m for n, m in found.items() if not any(_is_inside(n, other) for other in found)}


def _is_inside(name: str, other: str) -> bool:
    return name != other and (other == "" or name.startswith(other + "."))


def _by_feature_names(name: str, module: IdConsumer) -> Lookups:
    features: list[str] = list(getattr(module, "feature_names", None) or [])
    hint = f"say which ids it looks up, as in feeds(model, {{'{name}': lambda batch: [batch['ids']]}})"
    if not features:
        raise ValueError(f"module '{name}' does not take features by name: {hint}")

    def lookups(batch: Any) -> list[Any]:
        kjts = [v for _, v in walk({"batch": batch}) if type_name(v) == "KeyedJaggedTensor"]
        for kjt in cast("list[Any]", kjts):
            # Whole, not restricted: the module picks its features in forward, and knows these very tensors again.
            if set(features) <= set(kjt.keys()):
                return [kjt]
        raise ValueError(
            f"module '{name}' takes features {features}, and no KeyedJaggedTensor of the batch has them all: {hint}"
        )

    return lookups
