"""Optimizers that update the rows of a batch and no others, one step a backward.

Only such optimizers can be prioritized exactly: one that changes absent rows (momentum, decoupled weight decay) would
change rows after they were prefetched. Formulas are those of FBGEMM's fused optimizers; see `fs_kernels`.
"""

from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

import fs_kernels

State = dict[str, Tensor]
"""By the names that TorchRec saves them under: a row of each belongs to the same row of the weight."""


class RowOptimizer(Protocol):
    """What a store needs; hashable, so that all ranks can compare their settings."""

    @property
    def lr(self) -> float: ...

    @property
    def counts_steps(self) -> bool:
        """Whether the number of steps so far changes an update, and so belongs to the state."""
        ...

    def with_lr(self, lr: float) -> "RowOptimizer": ...

    def make_state(self, weight: Tensor) -> State: ...

    def update_(self, weight: Tensor, state: State, rows: Tensor, grad: Tensor, step: int) -> None:
        """Updates `weight[rows]`, `rows` `(K,)` distinct, by `grad` `(K, D)`; `step` counts backwards from 1."""
        ...


def _accumulator(weight: Tensor) -> torch.dtype:
    return torch.float64 if weight.dtype == torch.float64 else torch.float32


def _like(weight: Tensor) -> Tensor:
    return torch.zeros_like(weight, dtype=_accumulator(weight))


@dataclass(frozen=True, slots=True)
class SGD:
    lr: float

    @property
    def counts_steps(self) -> bool:
        return False

    def with_lr(self, lr: float) -> "SGD":
        return replace(self, lr=lr)

    def make_state(self, weight: Tensor) -> State:
        return {}

    def update_(self, weight: Tensor, state: State, rows: Tensor, grad: Tensor, step: int) -> None:
        fs_kernels.sgd_update_(weight, rows, grad, lr=self.lr)


@dataclass(frozen=True, slots=True)
class Adagrad:
    lr: float
    eps: float = 1e-8

    @property
    def counts_steps(self) -> bool:
        return False

    def with_lr(self, lr: float) -> "Adagrad":
        return replace(self, lr=lr)

    def make_state(self, weight: Tensor) -> State:
        return {"momentum1": _like(weight)}

    def update_(self, weight: Tensor, state: State, rows: Tensor, grad: Tensor, step: int) -> None:
        fs_kernels.adagrad_update_(weight, state["momentum1"], rows, grad, lr=self.lr, eps=self.eps)


@dataclass(frozen=True, slots=True)
class RowWiseAdagrad:
    """One accumulator a row: the mean of the squared gradient over the row."""

    lr: float
    eps: float = 1e-8

    @property
    def counts_steps(self) -> bool:
        return False

    def with_lr(self, lr: float) -> "RowWiseAdagrad":
        return replace(self, lr=lr)

    def make_state(self, weight: Tensor) -> State:
        return {"momentum1": torch.zeros(len(weight), dtype=_accumulator(weight), device=weight.device)}

    def update_(self, weight: Tensor, state: State, rows: Tensor, grad: Tensor, step: int) -> None:
        fs_kernels.rowwise_adagrad_update_(weight, state["momentum1"], rows, grad, lr=self.lr, eps=self.eps)


@dataclass(frozen=True, slots=True)
class Adam:
    """Bias correction counts backwards, not the updates of a row, as FBGEMM does."""

    lr: float
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8

    @property
    def counts_steps(self) -> bool:
        return True

    def with_lr(self, lr: float) -> "Adam":
        return replace(self, lr=lr)

    def make_state(self, weight: Tensor) -> State:
        return {"momentum1": _like(weight), "exp_avg_sq": _like(weight)}

    def update_(self, weight: Tensor, state: State, rows: Tensor, grad: Tensor, step: int) -> None:
        fs_kernels.adam_update_(
            weight,
            state["momentum1"],
            state["exp_avg_sq"],
            rows,
            grad,
            lr=self.lr,
            beta1=self.beta1,
            beta2=self.beta2,
            eps=self.eps,
            step=step,
        )
