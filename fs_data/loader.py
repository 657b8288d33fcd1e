"""BalancedDataLoader: wraps any loader so that every rank's batches take about the same time."""

import contextlib
import io
import logging
import os
import socket
import sys
import threading
import warnings
import weakref
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from dataclasses import replace as replace_fields
from os import PathLike
from typing import Any, Generic, TypeVar, cast, get_args

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor, nn

from fs_data import cost as costs
from fs_data import partition
from fs_data.agree import raise_failures
from fs_data.audit import Auditor, AuditReport
from fs_data.cost import CostModel
from fs_data.device import Lane
from fs_data.errors import LoaderError
from fs_data.exchange import Exchange, ExchangeConfig, OnExhausted
from fs_data.feeds import Feeds, Lookups
from fs_data.hooks import Attachment, ComputeTimes
from fs_data.journal import Journal, Replay
from fs_data.local import Held, Measures, row_lengths
from fs_data.partition import Partitioner
from fs_data.pipeline import Handed, Pipeline
from fs_data.planner import Planner
from fs_data.reader import Reader, has_state
from fs_data.schema import BatchSchema
from fs_data.stats import LoaderStats, ScalarWriter, Totals, write_scalars
from fs_data.weights import GivenBatches
from fs_data.world import Ranks, make_world

logger = logging.getLogger(__name__)

T_co = TypeVar("T_co", covariant=True)

_STATE_VERSION = 1
PATIENCE_S = 10.0
"""For other ranks, when this one leaves with an error: they may be waiting for it elsewhere, and so never come."""
_BEGINNING: dict[str, Any] = {
    "inner": None, "count": 0, "exhausted": False, "step": 0, "step_in_pass": 0, "held": None, "planner": {},
}  # fmt: skip


class BalancedDataLoader(Generic[T_co]):
    """Yields the wrapped loader's batches, their samples exchanged between ranks so that no rank waits for another.

    Samples move within one global batch only: no sample changes its step, none is lost or doubled. Batches keep their
    type. Balancing runs in background threads on a process group of its own, while the model trains on earlier batches:
    one batch is trained on, up to two are balanced ahead, and one is drawn from the wrapped loader.

    Construction is collective, and so is each pass over the data: all ranks must take the same steps.

    Args:
        loader: Any iterable of batches; `len`, `state_dict`, `set_epoch` and other attributes are passed through.
        schema: How batches split into samples; what it does not declare is inferred from the first batch.
        partitioner: A name (`"few_moves"`, `"lpt"`, `"fbs"`, `"vbs"`, `"identity"`), or a deterministic function from
            `WorldBatch` and `RuntimeInfo` to the destination rank of each sample.
        max_tokens: Most tokens that a rank may get; None sets no limit.
        max_samples: Most samples that a rank may get; None sets no limit.
        cost: What samples cost: a name (`"linear"`, `"power"`, `"quadratic"`, `"calibrated"`), a model from
            `fs_data.cost`, or a function from `Features` to int64. None is the static quadratic model.
        length: The path of the jagged leaf whose row lengths are the samples' lengths, or a function of a batch that
            gives them; None takes the longest jagged row of each sample.
        weights: Loss weights of samples by task, as functions of a batch that give `(B,)` numbers of at least 0; see
            `loss_scale`. The task `"samples"`, where each sample weighs 1, is always there.
        defer: Steps that a sample may wait whose cost alone exceeds a rank's mean, until there is one for each rank; 0
            lets none wait, so that no sample changes its step.
        audit: Leaves every batch as it was dealt, and predicts from measured times what balancing would save (`audit`).
        journal: A file in which rank 0 writes a short line for each plan, so that the run can be replayed.
        replay: The journal of an earlier run: plans that learned from measured times are made as they were then.
        on_exhausted: When some ranks run out of batches: `"balance"` spreads the rest over all ranks, `"stop"` ends the
            pass on all, `"error"` raises.
        device: Where batches are to lie when they are handed out; None leaves them where they are. Batches in host
            memory are exchanged there, pinned, and copied while earlier batches are trained on.
        group: The process group to balance over, which nothing else may use; None makes one of all ranks, or works
            alone where torch.distributed is not initialized.
        timeout_s: The longest wait for the wrapped loader's next batch, or for another rank.
        writer: Given each step's figures as scalars; anything with TensorBoard's `add_scalar(tag, value, step)`.
        log_every: Steps between lines of the log at level INFO.
    """

    def __init__(
        self,
        loader: Iterable[T_co],
        *,
        schema: BatchSchema | Mapping[str, Any] | None = None,
        partitioner: str | Partitioner = "few_moves",
        max_tokens: int | None = None,
        max_samples: int | None = None,
        cost: str | CostModel | None = None,
        length: str | Callable[[Any], Any] | None = None,
        weights: Mapping[str, Callable[[Any], Any]] | None = None,
        defer: int = 0,
        audit: bool = False,
        journal: str | PathLike[str] | None = None,
        replay: str | PathLike[str] | None = None,
        on_exhausted: OnExhausted = "balance",
        device: torch.device | str | int | None = None,
        group: dist.ProcessGroup | None = None,
        timeout_s: float = 600.0,
        writer: ScalarWriter | None = None,
        log_every: int = 1000,
    ) -> None:
        if on_exhausted not in get_args(OnExhausted):
            raise ValueError(f"on_exhausted must be one of {get_args(OnExhausted)}, got {on_exhausted!r}")
        if weights and "samples" in weights:
            raise ValueError("the task 'samples' is built in and weighs every sample 1; name yours otherwise")
        if defer < 0:
            raise ValueError(f"defer must be at least 0 steps, got {defer}")
        if log_every < 1:
            raise ValueError(f"log_every must be at least 1, got {log_every}")
        self._loader, self._writer, self._log_every = loader, writer, log_every
        self._timeout_s = timeout_s
        # A peer may legitimately wait as long as this rank's loader takes, and tells of its failure afterwards.
        self._world = make_world(group, timeout_s * 1.1 + 5)
        schema = schema if isinstance(schema, BatchSchema) else BatchSchema(schema)
        weights = dict(weights or {})
        measures = Measures(length=row_lengths(length) if isinstance(length, str) else length, weights=weights)
        here = np.asarray([zlib.crc32(socket.gethostname().encode()), _len(loader)])
        host_names, lengths = self._world.gather(here, "construction").T
        hosts = _hosts(host_names)
        steps = lengths.min() if on_exhausted == "stop" else lengths.max()
        self._len = int(steps) if (lengths >= 0).all() else None
        settings = _as_text(
            partitioner=_name(partitioner),
            max_tokens=max_tokens,
            max_samples=max_samples,
            cost=_name(cost),
            defer=defer,
            on_exhausted=on_exhausted,
            weights=list(weights),
            group=_name(schema.group),
            hosts=hosts.tolist() if hosts.any() else "one",
        )
        agreed = "\n".join([settings, _as_text(audit=audit, replay=replay is not None)])
        config = ExchangeConfig(schema=schema, measures=measures, on_exhausted=on_exhausted, settings=agreed)
        journaled = replayed = error = None
        try:
            if journal is not None and self._world.rank == 0:
                journaled = Journal(journal, world_size=self._world.size, settings=settings)
            if replay is not None:
                replayed = Replay(replay, world_size=self._world.size, settings=settings)
        except Exception as e:
            error = e  # of this rank's files alone: the others must not wait for its first batch
        failed = self._world.gather(np.asarray([error is not None], np.int64), "construction")
        raise_failures(self._world, failed[:, 0], error, "construction")
        planner = Planner(
            partition.make(partitioner, max_tokens=max_tokens, max_samples=max_samples),
            costs.make(cost),
            world_size=self._world.size,
            host=hosts,
            max_wait=defer,
            auditor=Auditor() if audit else None,
            journal=journaled,
            replay=replayed,
        )
        self._exchange = Exchange(self._world, config, planner)
        self._lane = Lane(None if device is None else torch.device(device))
        self._exchange.pin_memory = self._lane.pins
        self._times = ComputeTimes()
        self._attachment: Attachment | None = None
        self._feeds: list[Feeds] = []
        self._threads: list[threading.Thread] = []  # of the last pass
        if group is None and isinstance(self._world, Ranks):
            weakref.finalize(self, _release, os.getpid(), self._threads, self._world.group).atexit = False
        self._pipeline: Pipeline | None = None
        self._own_state: dict[str, Any] | None = None
        self._resume: dict[str, Any] | None = None
        self._given = GivenBatches()
        self._step = 0
        self._weights_used = False
        self._totals = Totals()

    # ---- iteration --------------------------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[T_co]:
        # A generator: the pass begins with its first batch, since some trainers call iter() more than once.
        pipeline = self._begin_pass()
        try:
            fed: Any = None  # the batch whose ids the modules have been told last
            while (handed := self._next(pipeline)) is not None:
                batch = handed.current.moved.take() if fed is None else fed
                if fed is None:
                    self._prefetch(batch)
                fed = handed.following.moved.take() if handed.following else None
                self._prefetch(fed)
                self._note(handed, batch)
                del handed  # the batch must not live on while the next is waited for
                pipeline.step_begins()
                yield cast("T_co", batch)
                del batch
            self._prefetch(None)  # a second None: the loop is over, and a step that a module was left out of is closed
            self._flush()
            if pipeline.end_state is not None:
                planner_state = self._exchange.planner.state_dict()
                ended = {"step": self._exchange.num_steps, "step_in_pass": 0, "held": None, "planner": planner_state}
                self._own_state = pipeline.end_state | ended
        finally:
            pipeline.stop("break, or an exception in the loop")

    def _begin_pass(self) -> Pipeline:
        self._supersede("a new pass over the data began")
        resume, self._resume = self._resume or {}, None
        self._exchange.num_in_pass = resume.get("step_in_pass", 0)
        held = resume.get("held")
        self._exchange.held = Held.from_state(held) if held else None
        if self._exchange.schema is not None:
            self._exchange.schema.forget_batches()
        self._flush()
        reader = Reader(
            self._loader,
            exhausted=resume.get("exhausted", False),
            skip=resume.get("count", 0) if resume.get("inner") is None else 0,
            timeout_s=self._timeout_s,
            tells_last=self._exchange.planner.max_wait > 0,  # samples must not wait for a step that never comes
        )
        self._pipeline = Pipeline(self._world, self._exchange, reader, self._lane)
        self._threads[:] = [self._pipeline.thread]
        return self._pipeline

    def _next(self, pipeline: Pipeline) -> Handed | None:
        step = self._step  # the step that just ended is step − 1; on a GPU the one before it is surely complete
        optimizer_steps = self._attachment.optimizer_steps if self._attachment else -1
        with torch.profiler.record_function("fs_data::next"):
            return pipeline.next(optimizer_steps, self._times.of(step - 2))

    def _prefetch(self, batch: Any) -> None:
        for feeds in self._feeds:
            feeds.prefetch(batch)

    def _flush(self) -> None:
        for feeds in self._feeds:
            feeds.flush()

    def _note(self, handed: Handed, batch: Any) -> None:
        balanced = handed.current.balanced
        held = balanced.held.state_dict() if balanced.held else None
        self._own_state = handed.state | {
            "step": balanced.step + 1,
            "step_in_pass": balanced.step_in_pass + 1,
            "held": held,
            "planner": balanced.planner_state,
        }
        self._step = balanced.step + 1
        self._times.begin_step(balanced.step)
        self._given.add(batch, balanced, self._exchange.bound_schema)
        step = replace_fields(handed.current.stats, exposed_wait_ms=handed.exposed_wait_s * 1000)
        self._totals.add(step)
        if self._writer is not None:
            write_scalars(self._writer, step)
        if step.step % self._log_every == self._log_every - 1:
            logger.info("rank %d: %s", self._world.rank, step.line())
        if step.copies and not self._weights_used:
            self._weights_used = True
            warnings.warn(
                f"batch {step.step} has fewer samples than ranks, so {step.copies} ranks train on a copy; copies weigh "
                "0: use loader.loss_scale(batch) or loader.sample_weights(batch), or they count in the loss",
                stacklevel=3,
            )

    def feeds(self, model: nn.Module, lookups: Mapping[str, Lookups] | None = None) -> None:
        """Hands the ids of coming batches to the model's embedding modules, those with `prefetch` and `flush`.

        Args:
            model: Searched with `named_modules`; wrappers such as DDP are looked through.
            lookups: For each such module by name, a function of a batch that gives the ids of its lookups in call
                order. None gives each module the batch's KeyedJaggedTensor that has its `feature_names`.
        """
        self._feeds.append(Feeds(model, lookups))

    def attach(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Starts each stage of balancing where the paper does, by hooks on `model` and `optimizer` (see `hooks`).

        It also times this rank's compute in each step, for cost models that learn, and counts its optimizer steps, so
        that a rank that skips a step alone is an error on all. Must be called on all ranks, or on none.
        """
        self.detach()
        self._attachment = Attachment(model, optimizer, self._exchange.pace, self._times)

    def detach(self) -> None:
        """Removes the hooks of `attach`."""
        if self._attachment is not None:
            self._attachment.remove()
            self._attachment = None

    def record_compute(self, seconds: float) -> None:
        """Without `attach`: this rank's own compute time in the current step, waiting for other ranks left out."""
        self._times.add(lambda: seconds)

    def close(self) -> None:
        """Ends the pass, its threads and the wrapped loader's workers, and removes hooks; may be called twice.

        Workers that are persistent end with the wrapped loader.
        """
        self._leave(sys.exc_info()[1])

    def __enter__(self) -> "BalancedDataLoader[T_co]":
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._leave(error)

    def _leave(self, error: BaseException | None) -> None:
        self.detach()
        try:
            if error is None:
                self._end_pass("closed", self._timeout_s)
            else:
                self._end_pass(f"{type(error).__name__}: {error}", min(PATIENCE_S, self._timeout_s))
        except LoaderError:
            if error is None:  # else the loop's own error says more
                raise
        finally:
            if self._exchange.planner.journal is not None:
                self._exchange.planner.journal.close()

    def _supersede(self, reason: str) -> None:
        """Ends the pass for another; a loop that is still in it must not take that for the end of the data."""
        if self._pipeline is not None:
            self._pipeline.stop(reason, LoaderError(f"this pass over the data was ended: {reason}; leave its loop"))
        self._end_pass(reason, self._timeout_s)

    def _end_pass(self, reason: str, patience_s: float) -> None:
        pipeline, self._pipeline = self._pipeline, None
        if pipeline is None:
            return
        pipeline.stop(reason)
        if not pipeline.join(patience_s):
            raise LoaderError(f"the last pass did not end within {patience_s} s: another rank is still inside it")
        pipeline.reader.join(5.0)

    # ---- weights ----------------------------------------------------------------------------------------------------

    def loss_scale(self, batch: Any, task: str = "samples") -> float:
        """What to multiply this rank's weighted mean loss with, so that gradients averaged over ranks are exact.

        Ranks have different numbers of samples, so the mean of their means is not the mean. With loss
        `Σ w_s·l_s / w_r` on each rank, `w_r` its sum of weights, the factor is `R·w_r / ΣW`: averaging over R ranks, as
        DDP and FSDP2 do, then gives the gradient of `Σ w_s·l_s / ΣW` over the whole global batch.
        """
        weights, total = self._weights(batch, task)
        return self._world.size * float(weights.sum()) / total if total else 0.0

    def sample_weights(self, batch: Any, task: str = "samples") -> Tensor:
        """`(B,)` float64 factors: `(factors * losses).sum()` on each rank, averaged over ranks, is the global mean.

        Unlike a mean times `loss_scale`, this also holds where a rank's weights are all 0.
        """
        weights, total = self._weights(batch, task)
        return torch.from_numpy(weights * (self._world.size / total if total else 0.0))

    def _weights(self, batch: Any, task: str) -> tuple[NDArray[np.float64], float]:
        self._weights_used = True
        return self._given.weights(batch, task, self._exchange.schema)

    # ---- state ------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The state that resumes after the batch handed out last; batches balanced ahead are not in it.

        Only this rank's: no communication. Its keys are the same before the first batch, as
        `torch.distributed.checkpoint` needs, and name the rank, so that each rank loads its own.
        """
        own = self._own_state or _BEGINNING
        if not has_state(self._loader) and own["count"]:
            logger.warning(
                "the wrapped %s has no state_dict: resuming will draw and drop %d batches, which is exact only if it "
                "gives the same batches again (torchdata's StatefulDataLoader resumes at once)",
                type(self._loader).__name__,
                own["count"],
            )
        data = io.BytesIO()
        torch.save(own, data)
        return {
            "version": _STATE_VERSION,
            "world_size": self._world.size,
            f"dp_rank_{self._world.rank}": data.getvalue(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The next pass goes on after the batch of `state`; no communication."""
        if state.get("version") != _STATE_VERSION:
            raise ValueError(f"the state must be of version {_STATE_VERSION}, got {state.get('version')!r}")
        if state.get("world_size") != self._world.size:
            raise ValueError(
                f"the state was saved by {state.get('world_size')} ranks and cannot be loaded by {self._world.size}; "
                "ParquetUIHDataset.reshard(states) carries a dataset's position to another number of ranks"
            )
        key = f"dp_rank_{self._world.rank}"
        if key not in state:
            raise ValueError(f"the state has no '{key}': it is that of another rank ({sorted(state)})")
        self._supersede("a state was loaded")
        try:
            own = torch.load(io.BytesIO(state[key]), weights_only=True)
        except Exception as e:
            raise ValueError(f"the state's '{key}' must be as state_dict() gave it, and cannot be read: {e}") from e
        if own["inner"] is not None:
            if not has_state(self._loader):
                raise ValueError(
                    f"the state holds one of the wrapped loader, but {type(self._loader).__name__} has no "
                    "load_state_dict"
                )
            cast("Any", self._loader).load_state_dict(own["inner"])
        self._exchange.num_steps = self._step = own["step"]
        self._exchange.planner.load_state_dict(own["planner"])
        self._resume = self._own_state = own

    # ---- conventions ------------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        """The number of steps, agreed at construction: batches of the longest loader, with "stop" of the shortest."""
        if self._len is None:
            raise TypeError(f"the wrapped {type(self._loader).__name__} has no length on every rank")
        return self._len

    def set_epoch(self, epoch: int) -> None:
        """Passed on to the wrapped loader, its sampler and its dataset, where they have it."""
        owners = [self._loader, *(getattr(self._loader, n, None) for n in ("sampler", "batch_sampler", "dataset"))]
        for owner in owners:
            if hasattr(owner, "set_epoch"):
                cast("Any", owner).set_epoch(epoch)

    def audit(self) -> AuditReport:
        """What stragglers cost so far and what balancing would save, with `audit=True`; no communication."""
        auditor = self._exchange.planner.auditor
        if auditor is None:
            raise ValueError("an audit needs BalancedDataLoader(..., audit=True)")
        return auditor.report()

    def stats(self) -> LoaderStats:
        """Imbalance, bytes and times over all steps so far; no communication."""
        return self._totals.stats()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._loader, name)


def _release(pid: int, threads: list[threading.Thread], group: dist.ProcessGroup) -> None:
    """Ends the group of a loader that is gone; one whose thread still waits for other ranks stays."""
    for thread in threads:
        thread.join(1.0)
    if os.getpid() == pid and not any(t.is_alive() for t in threads) and dist.is_initialized():
        with contextlib.suppress(ValueError):  # torch.distributed was initialized anew
            dist.destroy_process_group(group)


def _len(loader: object) -> int:
    try:
        return len(cast("Any", loader))
    except (TypeError, NotImplementedError):
        return -1


def _hosts(hashes: NDArray[np.int64]) -> NDArray[np.int64]:
    """`(R,)`: hosts numbered from 0 in the order of their first rank."""
    _, first, inverse = np.unique(hashes, return_index=True, return_inverse=True)
    return np.argsort(np.argsort(first))[inverse.ravel()]


def _as_text(**settings: object) -> str:
    """What all ranks must have alike; a line a setting."""
    return "\n".join(f"{name}={value}" for name, value in settings.items())


def _name(value: object) -> str:
    """Tells one setting from another, without addresses, which differ by rank."""
    if value is None or isinstance(value, str | int | float):
        return str(value)
    if is_dataclass(value) and not isinstance(value, type):
        inside = ", ".join(f"{f.name}={_name(getattr(value, f.name))}" for f in fields(value))
        return f"{type(value).__qualname__}({inside})"
    return str(getattr(value, "__qualname__", None) or type(value).__qualname__)
