"""Tells of dense optimizers that were built before `prioritize`, and so hold weights that are no longer looked up."""

import functools
import weakref
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

_MARK = "_prioritized_in"  # on a weight that was replaced: the name of its module
_checked: "weakref.WeakSet[torch.optim.Optimizer]" = weakref.WeakSet()


def watch_for(weight: Tensor, name: str) -> None:
    """Has every optimizer that holds `weight`, replaced in module `name`, raise when it first steps."""
    setattr(weight, _MARK, name)
    _checked.clear()  # optimizers that stepped before may hold it
    _install()


@functools.cache
def _install() -> None:
    register_optimizer_step_pre_hook(_check)


def _check(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    if optimizer in _checked:
        return
    for group in optimizer.param_groups:
        for weight in group["params"]:
            if hasattr(weight, _MARK):
                raise RuntimeError(
                    f"{type(optimizer).__name__} holds the weight of {getattr(weight, _MARK)!r}, which prioritize has "
                    "replaced: build the dense optimizer after prioritize, the table has its own"
                )
    _checked.add(optimizer)
