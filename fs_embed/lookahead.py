"""Prefetching around any iterable of batches, for loops without fs_data."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TypeVar

from torch import Tensor, nn

from fs_embed.module import JaggedIds
from fs_embed.swap import prioritized_modules

B = TypeVar("B")


def lookahead(
    loader: Iterable[B], model: nn.Module, ids: "Mapping[str, Callable[[B], Sequence[Tensor | JaggedIds]]]"
) -> Iterator[B]:
    """The batches of `loader`, each after the next one's ids were announced to the model's tables.

    Args:
        ids: For each table's name in `named_modules()`, the lookups of one forward in call order. The very tensors that
            the model will look up: they are recognised by their memory.

    Raises:
        ValueError: A name that is no prioritized table, or a table without an entry.
    """
    tables = dict(prioritized_modules(model))
    if set(ids) != set(tables):
        raise ValueError(f"ids must have an entry for each prioritized table, {sorted(tables)}, got {sorted(ids)}")
    for module in tables.values():
        module.flush()
    waiting: list[B] = []
    for batch in loader:
        for name, module in tables.items():
            module.prefetch(ids[name](batch))
        waiting.append(batch)
        if len(waiting) == 2:
            yield waiting.pop(0)
    for module in tables.values():
        module.prefetch(None)
    yield from waiting
    for module in tables.values():
        module.prefetch(None)  # once more: the loop is over, also for a rank that skipped its last batch
        module.flush()
