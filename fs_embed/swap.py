"""Swapping a model's embedding modules for prioritized ones, and back."""

from collections.abc import Iterator
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from fs_embed.embedding import PrioritizedEmbedding
from fs_embed.optim import RowOptimizer
from fs_embed.tables import Mode

M = TypeVar("M", bound=nn.Module)


def prioritize(
    model: M,
    *,
    optimizer: RowOptimizer,
    mode: Mode = "prioritized",
    tables: "list[str] | None" = None,
    group: dist.ProcessGroup | None = None,
    timeout_s: float = 300.0,
    gradient_division: bool = True,
) -> M:
    """Replaces the model's `nn.Embedding` modules by row-wise sharded ones, in place; collective.

    Call it before DistributedDataParallel or FSDP wraps the model and before the dense optimizer is built: both would
    keep the replaced weights.

    Args:
        tables: Names as in `named_modules()` of those to replace; None replaces all `nn.Embedding`.
        optimizer: For all tables.

    Returns:
        `model`.

    Raises:
        ValueError: Nothing to replace, a name that is no `nn.Embedding`, or a table that cannot be exact (`max_norm`,
            `scale_grad_by_freq`, `sparse`, a weight that another module shares).
    """
    found = {name: m for name, m in model.named_modules() if type(m) is nn.Embedding}
    if tables is not None:
        if unknown := sorted(set(tables) - set(found)):
            raise ValueError(
                f"tables must name nn.Embedding modules of the model, got {unknown}; it has {sorted(found)}"
            )
        found = {name: found[name] for name in tables}
    if not found:
        raise ValueError(f"the model must have an nn.Embedding to prioritize, {type(model).__name__} has none")
    for name, old in found.items():
        _refuse_inexact(model, name, old)
    for name, old in found.items():
        new = PrioritizedEmbedding(
            old.weight,
            optimizer=optimizer,
            mode=mode,
            padding_idx=old.padding_idx,
            group=group,
            timeout_s=timeout_s,
            gradient_division=gradient_division,
            name=name,
        )
        new.train(old.training)
        model.set_submodule(name, new)
    return model


def unprioritize(model: M) -> M:
    """Puts plain `nn.Embedding` modules with the whole tables back, in place; collective."""
    for name, module in list(prioritized_modules(model)):
        module.flush()
        weight = module.tables.weight(0)
        whole = weight.full_tensor() if isinstance(weight, DTensor) else weight.clone()
        plain = nn.Embedding.from_pretrained(whole, freeze=False, padding_idx=module.padding_idx)
        plain.train(module.training)
        module.tables.lookup.close()
        model.set_submodule(name, plain)
    return model


def prioritized_modules(model: nn.Module) -> "Iterator[tuple[str, PrioritizedEmbedding]]":
    """The model's sharded tables, by name as in `named_modules()`."""
    return ((name, m) for name, m in model.named_modules() if isinstance(m, PrioritizedEmbedding))


class TableOptimizers:
    """The optimizer state of a model's tables, for checkpoints: a `Stateful` with sharded tensors.

    Put it beside the model: `{"model": model, "tables": TableOptimizers(model), …}`. Load the model first or together.
    """

    def __init__(self, model: nn.Module) -> None:
        self.modules = dict(prioritized_modules(model))

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = {}
        for name, module in self.modules.items():
            module.flush()
            state |= {f"{name}.{key}": value for key, value in module.tables.state(0).items()}
            state[f"{name}.num_steps"] = torch.tensor(module.tables.store.num_steps)
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, module in self.modules.items():
            module.tables.load(0, {key: state[f"{name}.{key}"] for key in module.tables.store.state})
            module.tables.store.num_steps = int(state[f"{name}.num_steps"])


def _refuse_inexact(model: nn.Module, name: str, module: nn.Embedding) -> None:
    reasons = {
        "max_norm": (module.max_norm is not None, "a lookup would change rows that were prefetched"),
        "scale_grad_by_freq": (module.scale_grad_by_freq, "it needs counts over the whole batch before any update"),
        "sparse": (module.sparse, "the fused optimizer takes the place of sparse gradients"),
    }
    for option, (is_set, why) in reasons.items():
        if is_set:
            raise ValueError(f"{name} must not use {option}: {why}; turn it off, or leave the table out of `tables`")
    holders = [n for n, p in model.named_parameters(remove_duplicate=False) if p is module.weight]
    if len(holders) > 1:
        raise ValueError(f"the weight of {name} must belong to it alone, it is also {holders[1:]}: untie the weights")
