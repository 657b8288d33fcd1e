"""`TableOptimizers`: the fused optimizers of a model's tables, as a `torch.optim.Optimizer`."""

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import nn

from fs_embed.module import PrioritizedModule
from fs_embed.swap import prioritized_modules


class TableOptimizers(torch.optim.Optimizer):
    """One parameter group for each prioritized module, for learning rate schedulers and checkpoints.

    `step` and `zero_grad` do nothing: rows are updated in the backward, with the learning rate that their group has
    then. The state dict holds sharded tensors and fits `torch.distributed.checkpoint` on any number of ranks: put it
    beside the model, `{"model": model, "tables": TableOptimizers(model), …}`.
    """

    def __init__(self, model: nn.Module) -> None:
        self.modules: dict[str, PrioritizedModule] = dict(prioritized_modules(model))
        if not self.modules:
            raise ValueError(
                f"the model must have prioritized tables, {type(model).__name__} has none: prioritize first"
            )
        groups: list[dict[str, Any]] = []
        for name, module in self.modules.items():
            stand_in = nn.Parameter(torch.zeros(0), requires_grad=False)  # torch's optimizers refuse empty groups
            groups.append({"params": [stand_in], "name": name, "lr": module.tables.stores[0].optimizer.lr})
        super().__init__(groups, {})
        for group, module in zip(self.param_groups, self.modules.values(), strict=True):
            for store in module.tables.stores:
                store.lr = reader_of(group)

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        return None if closure is None else closure()

    def zero_grad(self, set_to_none: bool = True) -> None:
        pass

    def spread_not_finite(self, optimizer: torch.optim.Optimizer) -> None:
        """Has a `GradScaler` skip `optimizer`'s step if tables skipped theirs, by a gradient that is infinite.

        To be called by every rank between the backward and `scaler.step(optimizer)`; the scale then goes down too. It
        waits for the newest update of each table, not for what is deferred. Tables skip together with those of their
        module: other modules were updated when their gradients came.
        """
        engines = [engine for module in self.modules.values() for engine in module.tables.engines]
        if any([engine.has_skipped() for engine in engines]):
            grads = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
            for grad in grads[:1]:
                grad.fill_(float("inf"))

    def state_dict(self) -> dict[str, Any]:
        """`"state"` by weight as TorchRec's fused optimizers have it, and `"param_groups"` by module."""
        state: dict[str, Any] = {}
        rates: dict[str, Any] = {}
        for group, (name, module) in zip(self.param_groups, self.modules.items(), strict=True):
            state |= {f"{name}.{key}": value for key, value in module.optimizer_state().items()}
            rates[name] = {"lr": torch.tensor(float(group["lr"]), dtype=torch.float64)}
        return {"state": state, "param_groups": rates}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes what `state_dict` gave; without `"param_groups"`, as TorchRec saves, learning rates stay."""
        rates = state_dict.get("param_groups", {})
        for group, (name, module) in zip(self.param_groups, self.modules.items(), strict=True):
            prefix = f"{name}."
            state = state_dict["state"].items()
            module.load_optimizer_state({k.removeprefix(prefix): v for k, v in state if k.startswith(prefix)})
            group["lr"] = float(rates[name]["lr"]) if name in rates else group["lr"]


def reader_of(group: dict[str, Any]) -> Callable[[], float]:
    """Reads the learning rate of a parameter group at the moment of the call."""
    return lambda: float(cast("float", group["lr"]))
