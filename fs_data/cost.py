"""What computing on a sample costs, in integers, from numbers that all ranks have gathered.

A sample's lengths are its history and the content of its candidates. With L each of them:

```
linear       ΣL                              lookups, projections, feed-forward layers
power        ΣL, raised to α                 the paper's weight of VBS
quadratic    c1·ΣL + c2·ΣL²                  attention beside the rest (the default, with static coefficients)
calibrated   the same, fitted to the times that ranks measured
```

Costs decide who trains on what, so every rank must compute the same ones to the last bit: integer arithmetic alone, but
for `power`, whose table of rounded powers is far from any tie.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from fs_data.errors import LoaderError
from fs_data.shuffle_plan import Features, Plan

Ints = NDArray[np.int64]

_MOST = 1 << 62  # a whole batch's cost stays below it, so that sums do not overflow


class CostModel(Protocol):
    """A cost model that learns also has `coefficients`, `adopt`, `observe`, `state_dict` and `load_state_dict`."""

    def __call__(self, features: Features) -> Ints:
        """`(N,)` int64 costs, at least 0, in a unit of the model's own."""
        ...


@dataclass(frozen=True)
class Linear:
    """Items, and `per_sample` more for each sample, in items."""

    per_sample: int = 0

    def __call__(self, features: Features) -> Ints:
        return total_length(features) + self.per_sample


@dataclass(frozen=True)
class Power:
    """L^α of the paper's VBS, in thousandths; powers are rounded once, so that all processors agree."""

    alpha: float = 1.5

    def __post_init__(self) -> None:
        if not 0 < self.alpha <= 3:
            raise ValueError(f"alpha must be over 0 and at most 3 (1 is linear, 2 attention alone), got {self.alpha}")

    def __call__(self, features: Features) -> Ints:
        lengths, inverse = np.unique(total_length(features), return_inverse=True)
        table = [1000.0 * float(x) ** self.alpha for x in lengths.tolist()]
        _check_total(max(table, default=0.0), len(features.rank), self)
        return np.asarray([round(x) for x in table], np.int64)[inverse.ravel()]


@dataclass(frozen=True)
class Quadratic:
    """`per_item`·ΣL + `per_item_squared`·ΣL² + `per_sample`: a transformer's floating-point operations by default.

    With width D, a layer's projections and feed-forward take about 10·D² operations an item, attention 2·D for each
    pair of items; the defaults are those of D = 1,024.
    """

    per_item: int = 10 * 1024**2
    per_item_squared: int = 2048
    per_sample: int = 0

    def __post_init__(self) -> None:
        for name in ("per_item", "per_item_squared", "per_sample"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 0:
                raise ValueError(f"{name} must be an integer of at least 0, got {value!r}")

    def __call__(self, features: Features) -> Ints:
        items, squares = total_length(features), total_of_squares(features)
        dearest = float(items.max(initial=0)) * self.per_item + float(squares.max(initial=0)) * self.per_item_squared
        _check_total(dearest + self.per_sample, len(items), self)
        return self.per_item * items + self.per_item_squared * squares + self.per_sample


class Calibrated:
    """Quadratic with coefficients fitted to measured times: t = c0 + c1·ΣL + c2·ΣL², none below 0.

    The fit is that of least squares over all ranks' times of all steps so far (after `warm_up` of them). Rank 0's
    result, as integers, travels to all ranks with the next batch, so ranks use the same even where their processors
    round differently. c0 is what a step takes whatever its samples: it cannot be balanced, and no sample costs it.

    Until `min_steps` steps have been measured, and where times do not depend on lengths, costs are those of `start`.

    Args:
        start: The costs to begin with.
        warm_up: Measured steps to leave out: compilation and caches make the first ones slow.
        min_steps: Measured steps before the fit is used.
        refit_every: Measured steps between fits.
        freeze_after: Measured steps after which coefficients never change again, and plans depend on lengths alone.
    """

    def __init__(
        self,
        start: CostModel | None = None,
        *,
        warm_up: int = 5,
        min_steps: int = 10,
        refit_every: int = 10,
        freeze_after: int = 200,
    ) -> None:
        if warm_up < 0 or refit_every < 1 or not 1 <= min_steps <= freeze_after:
            raise ValueError(
                "calibrated must have warm_up ≥ 0, refit_every ≥ 1 and 1 ≤ min_steps ≤ freeze_after, got "
                f"{warm_up}, {refit_every}, {min_steps} and {freeze_after}"
            )
        self.start: CostModel = start or Quadratic()
        self.warm_up, self.min_steps = warm_up, min_steps
        self.refit_every, self.freeze_after = refit_every, freeze_after
        self._seen = 0
        self._moments = Moments()
        self._fitted: tuple[int, ...] = (0, 0, 0)  # this rank's
        self._used: tuple[int, ...] = (0, 0, 0)  # rank 0's, at the latest batch

    @property
    def frozen(self) -> bool:
        return self._seen >= self.warm_up + self.freeze_after

    def __call__(self, features: Features) -> Ints:
        _, per_item, per_item_squared = self._used
        if not (per_item or per_item_squared):
            return self.start(features)
        return Quadratic(per_item, per_item_squared)(features)

    def coefficients(self) -> tuple[int, ...]:
        """c0, c1 and c2 in 2⁻²⁰ ns, as this rank has fitted them; zeros before there is a fit."""
        return self._fitted

    def adopt(self, coefficients: Ints) -> None:
        """Takes rank 0's for the batch that is planned now."""
        self._used = tuple(int(c) for c in coefficients[:3])

    def observe(self, plan: Plan, compute_ns: Ints) -> None:
        """Learns from the times `(R,)` that ranks computed for on `plan`."""
        if self.frozen:
            return
        self._seen += 1
        measured = self._seen - self.warm_up
        if measured <= 0:
            return
        self._moments.add(rank_sums(plan), compute_ns)
        if measured >= self.min_steps and ((measured - self.min_steps) % self.refit_every == 0 or self.frozen):
            self._fitted = quantise(self._moments.fit())

    def decision(self) -> list[int] | None:
        """What the latest costs took from measured times, for a journal: coefficients; None while there are none."""
        return list(self._used) if any(self._used) else None

    def replay(self, decision: list[int] | None) -> None:
        """Takes the coefficients of the coming step from a journal."""
        self._used = tuple(decision) if decision is not None else (0, 0, 0)

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self._seen, "moments": self._moments.values.tolist(), "fitted": list(self._fitted)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._seen = state["seen"]
        self._moments = Moments(np.asarray(state["moments"], np.float64))
        self._fitted = self._used = tuple(state["fitted"])


_UNITS_PER_NS = 1 << 20
"""c2 is below a picosecond: an integer number of 2⁻²⁰ ns keeps five digits of it."""


class Moments:
    """Sums of products of (1, ΣL, ΣL², t) over ranks and steps: all that a fit needs, in constant space."""

    def __init__(self, values: NDArray[np.float64] | None = None) -> None:
        self.values = np.zeros((4, 4)) if values is None else values

    def add(self, sums: Ints, compute_ns: Ints) -> None:
        """Adds the ranks' `sums` (R, 3) and times (R,) of one step."""
        rows = np.c_[sums.astype(np.float64), compute_ns.astype(np.float64)]
        self.values += rows.T @ rows

    def fit(self) -> NDArray[np.float64]:
        """`(3,)` c0, c1, c2 in ns, at least 0, with the least sum of squared errors.

        Non-negative least squares by its definition: the optimum is the plain least-squares solution over its own
        support, so of all subsets of coefficients, the best whose solution is not negative.
        """
        scale = np.sqrt(np.maximum(np.diag(self.values)[:3], 1e-300))
        gram = self.values[:3, :3] / scale / scale[:, None]
        right = self.values[:3, 3] / scale
        best, best_error = np.zeros(3), 0.0  # errors are those above Σt², which all subsets share
        for subset in (s for s in range(1, 8) if gram[0, 0]):
            some = [i for i in range(3) if subset >> i & 1]
            found = np.linalg.lstsq(gram[np.ix_(some, some)], right[some], rcond=1e-10)[0]
            error = float(found @ gram[np.ix_(some, some)] @ found - 2 * found @ right[some])
            if (found >= 0).all() and error < best_error * (1 + 1e-12):
                best, best_error = np.zeros(3), error
                best[some] = found
        return best / scale


def quantise(coefficients: NDArray[np.float64]) -> tuple[int, ...]:
    """Coefficients in ns as integers of 2⁻²⁰ ns."""
    return tuple(round(float(c) * _UNITS_PER_NS) for c in coefficients)


def rank_sums(plan: Plan) -> Ints:
    """`(R, 3)`: 1, ΣL and ΣL² over each rank's samples after `plan`; copies count, since they are computed too."""
    size = plan.world_size
    return np.stack(
        [
            np.ones(size, np.int64),
            _sum_by(plan.destination, total_length(plan.features)[plan.sample], size),
            _sum_by(plan.destination, total_of_squares(plan.features)[plan.sample], size),
        ],
        axis=1,
    )


def total_length(features: Features) -> Ints:
    """`(N,)`: items of the history and of all candidates' content."""
    return features.num_tokens + features.content_sum


def total_of_squares(features: Features) -> Ints:
    """`(N,)`: the squares of a sample's lengths, summed: sequences attend to themselves, not to each other."""
    return features.num_tokens**2 + features.content_sum_of_squares


_MAKERS: dict[str, Callable[..., CostModel]] = {
    "linear": Linear,
    "power": Power,
    "quadratic": Quadratic,
    "calibrated": Calibrated,
}
NAMES = tuple(_MAKERS)


def make(cost: str | CostModel | None = None, **settings: Any) -> CostModel:
    """A cost model by name, a user's own function of `Features`, or by default the static quadratic one."""
    if cost is None:
        cost = "quadratic"
    if isinstance(cost, str):
        if cost not in _MAKERS:
            raise ValueError(f"cost must be one of {sorted(NAMES)} or a function of Features, got {cost!r}")
        return _MAKERS[cost](**settings)
    if not callable(cost):
        raise TypeError(f"cost must be one of {sorted(NAMES)} or a function of Features, got {cost!r}")
    if settings:
        raise ValueError(f"settings go with a cost model's name, got {sorted(settings)} beside {cost!r}")
    return cost


def _sum_by(rank: Ints, amount: Ints, size: int) -> Ints:
    total = np.zeros(size, np.int64)
    np.add.at(total, rank, amount)
    return total


def _check_total(dearest: float, num_samples: int, model: object) -> None:
    if dearest * num_samples >= _MOST:
        raise LoaderError(
            f"costs must sum to less than 2^62 over a batch, but {num_samples} samples may cost up to {dearest:.3g} "
            f"each with {model}; divide the model's coefficients"
        )
