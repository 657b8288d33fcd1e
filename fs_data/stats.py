"""What balancing did and what it cost, step by step."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from fs_data.exchange import Balanced
from fs_data.shuffle_plan import Plan


@dataclass(frozen=True, kw_only=True, slots=True)
class StepStats:
    """One global batch; the same on every rank but for times and weights."""

    step: int
    num_samples: int
    """Of all ranks."""
    imbalance_before: float
    """Costs as the loaders gave the samples, max/mean − 1 over ranks: how much longer the busiest computes."""
    imbalance: float
    """The same after balancing."""
    bound: float
    """What no plan can beat: the most expensive sample against the mean of a rank."""
    mean_cost_before: float
    """Of a rank."""
    mean_cost: float
    """Of a rank, after balancing; copies add to it."""
    bytes_moved: int
    """Sent between ranks, over all ranks."""
    bytes_total: int
    """Of all samples."""
    busiest_rank_bytes: int
    """The most that one rank sent or received."""
    peak_tokens: float
    """Most tokens of a rank over the mean after balancing: activation memory grows with it."""
    copies: int
    """Samples repeated with weight 0 for ranks that would have had none."""
    exposed_wait_ms: float = 0.0
    """How long this rank's training thread was blocked in `next()`."""
    data_wait_ms: float = 0.0
    """How long this rank's exchange waited for the wrapped loader."""
    stage_ms: dict[str, float] = field(default_factory=dict[str, float])
    """Time of this rank's background thread by stage."""

    def line(self) -> str:
        """For a log."""
        return (
            f"batch {self.step}: imbalance {self.imbalance:.2%} (was {self.imbalance_before:.2%}, bound "
            f"{self.bound:.2%}), "
            f"{self.bytes_moved / max(self.bytes_total, 1):.1%} of {self.bytes_total} bytes moved, waited "
            f"{self.exposed_wait_ms:.1f} ms"
        )


@dataclass(frozen=True, kw_only=True)
class LoaderStats:
    """Over the steps handed out so far. Costs are summed over steps before the ratio, so long steps count more."""

    steps: int = 0
    imbalance_before: float = 0.0
    imbalance: float = 0.0
    bound: float = 0.0
    bytes_moved: int = 0
    bytes_moved_share: float = 0.0
    busiest_rank_bytes: int = 0
    peak_tokens: float = 0.0
    copies: int = 0
    exposed_wait_ms: float = 0.0
    """Mean of a step."""
    data_wait_ms: float = 0.0
    stage_ms: dict[str, float] = field(default_factory=dict[str, float])
    """Means of a step."""
    last: StepStats | None = None


class ScalarWriter(Protocol):
    """What TensorBoard's SummaryWriter offers."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> None: ...


def write_scalars(writer: ScalarWriter, step: StepStats) -> None:
    """Every figure of the step under `fs_data/`."""
    for name, value in asdict(step).items():
        if name == "stage_ms":
            for stage, ms in step.stage_ms.items():
                writer.add_scalar(f"fs_data/stage_ms/{stage}", ms, step.step)
        elif name != "step":
            writer.add_scalar(f"fs_data/{name}", value, step.step)


def step_stats(balanced: Balanced, data_wait_s: float) -> StepStats:
    """All but the exposed wait, which only the training thread knows."""
    plan = balanced.plan
    before, after = plan.loads()
    sent, received = plan.traffic()
    return StepStats(
        step=balanced.step,
        num_samples=len(plan.cost),
        imbalance_before=over_mean(before),
        imbalance=over_mean(after),
        bound=_bound(plan),
        mean_cost_before=float(before.mean()),
        mean_cost=float(after.mean()),
        bytes_moved=int(sent.sum()),
        bytes_total=int(plan.features.num_bytes.sum()),
        busiest_rank_bytes=int(max(sent.max(), received.max())),
        peak_tokens=over_mean(plan.tokens()[1]) + 1,
        copies=int(plan.is_copy.sum()),
        data_wait_ms=data_wait_s * 1000,
        stage_ms={name: s * 1000 for name, s in balanced.seconds.items()},
    )


class Totals:
    """Sums up steps without keeping them."""

    def __init__(self) -> None:
        self.steps = 0
        self._sums: dict[str, float] = {}
        self._stages: dict[str, float] = {}
        self._last: StepStats | None = None

    def add(self, step: StepStats) -> None:
        self.steps += 1
        amounts = {
            "mean_before": step.mean_cost_before, "max_before": (1 + step.imbalance_before) * step.mean_cost_before,
            "mean_after": step.mean_cost, "max_after": (1 + step.imbalance) * step.mean_cost,
            "max_bound": (1 + step.bound) * step.mean_cost_before,
            "moved": step.bytes_moved, "bytes": step.bytes_total, "busiest": step.busiest_rank_bytes,
            "tokens": step.peak_tokens, "copies": step.copies, "wait": step.exposed_wait_ms,
            "data": step.data_wait_ms,
        }  # fmt: skip
        for name, amount in amounts.items():
            self._sums[name] = self._sums.get(name, 0.0) + float(amount)
        for name, ms in step.stage_ms.items():
            self._stages[name] = self._stages.get(name, 0.0) + ms
        self._last = step

    def stats(self) -> LoaderStats:
        if not self.steps:
            return LoaderStats()
        s, n = self._sums, self.steps
        return LoaderStats(
            steps=n,
            imbalance_before=_ratio(s["max_before"], s["mean_before"]) - 1,
            imbalance=_ratio(s["max_after"], s["mean_after"]) - 1,
            bound=_ratio(s["max_bound"], s["mean_before"]) - 1,
            bytes_moved=int(s["moved"]),
            bytes_moved_share=s["moved"] / max(s["bytes"], 1.0),
            busiest_rank_bytes=int(s["busiest"] / n),
            peak_tokens=s["tokens"] / n,
            copies=int(s["copies"]),
            exposed_wait_ms=s["wait"] / n,
            data_wait_ms=s["data"] / n,
            stage_ms={name: ms / n for name, ms in self._stages.items()},
            last=self._last,
        )


def over_mean(amounts: NDArray[np.int64] | Sequence[float]) -> float:
    """max/mean − 1; 0 where nothing has a cost."""
    array = np.asarray(amounts, np.float64)
    return _ratio(float(array.max()), float(array.mean())) - 1


def _bound(plan: Plan) -> float:
    mean = float(plan.cost.sum()) / plan.world_size
    return max(0.0, _ratio(float(plan.cost.max()), mean) - 1)


def _ratio(a: float, b: float) -> float:
    return a / b if b else 1.0
