"""The three stages of balancing (paper, Algorithm 1): gather lengths, gather candidate lengths, plan, shuffle samples.

Every decision that leads to a collective is made from gathered numbers alone, so all ranks take the same path: a rank
that failed says so in its header, and all raise the same error.

Legend: R ranks, N samples of all ranks, B samples of one rank, T tasks with loss weights.
"""

import contextlib
import hashlib
import pickle
import time
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fs_data.column import Part, join
from fs_data.errors import Disagreement, LoaderError, RankFailed
from fs_data.hooks import Pace
from fs_data.pack import block_bytes, pack, unpack
from fs_data.planner import Features, Plan, Planner
from fs_data.schema import BatchSchema, BoundSchema, Split
from fs_data.world import World, bytes_to_ints, gather_texts

Ints = NDArray[np.int64]
OnExhausted = Literal["balance", "stop", "error"]

_VERSION = 1


class _Head(IntEnum):
    """Where each number stands in a rank's header."""

    VERSION = 0
    SETTINGS = 1
    SCHEMA = 2
    STEP = 3
    SAMPLES = 4
    STATUS = 5
    EXHAUSTED = 6
    COMPUTE_NS = 7
    COEFFICIENTS = 8  # four of them


_HEAD_SIZE = 12
_OK, _FAILED = 0, 1


class _Row(IntEnum):
    """Where each number of a sample stands; after these, a float64's bits for each task's loss weight."""

    TOKENS = 0
    CANDIDATES = 1
    BYTES = 2
    GROUP = 3


@dataclass(frozen=True, kw_only=True)
class ExchangeConfig:
    schema: BatchSchema
    length: Callable[[Any], Any] | None
    """`(B,)` lengths of a batch's samples; None takes the longest jagged row of each."""
    weights: Mapping[str, Callable[[Any], Any]]
    """For each task, `(B,)` loss weights of a batch's samples."""
    on_exhausted: OnExhausted
    settings: str
    """What all ranks must have alike, as text."""


@dataclass(kw_only=True)
class Raw:
    """What this rank brings to one exchange."""

    batch: Any = None
    """None where the loader is exhausted, or failed."""
    error: BaseException | None = None
    state: Any = None
    """The wrapped loader's state after this batch."""
    drawn: torch.cuda.Event | None = None
    """When a batch on a GPU is complete."""
    wait_s: float = 0.0
    """How long the exchange waited for the wrapped loader."""


@dataclass(kw_only=True)
class Balanced:
    """One rank's part of a balanced global batch."""

    step: int
    batch: Any
    plan: Plan
    weights: dict[str, NDArray[np.float64]]
    """`(n,)` loss weights of this rank's samples for each task; copies that only fill up a rank weigh 0."""
    total_weights: dict[str, float]
    """Sums over all ranks."""
    error: BaseException | None = None
    """What went wrong on this rank alone, after the samples had been exchanged."""
    seconds: dict[str, float] = field(default_factory=dict[str, float])
    """By stage."""


@dataclass
class _Local:
    """This rank's batch, ready for stage 1."""

    split: Split | None = None
    rows: Ints = field(default_factory=lambda: np.zeros((0, 0), np.int64))
    content_lengths: Ints = field(default_factory=lambda: np.zeros(0, np.int64))
    error: BaseException | None = None


class Exchange:
    """Runs the stages, batch after batch, for one loader; every call of `step` is collective."""

    def __init__(self, world: World, config: ExchangeConfig, planner: Planner) -> None:
        self.world, self.config, self.planner = world, config, planner
        self.schema: BoundSchema | None = None
        self.num_steps = 0
        self.pace = Pace()
        self.pin_memory = False
        """Whether exchanged samples are joined in pinned memory, for a copy to the device that overlaps."""
        self._capacity = 0  # samples a rank's message has room for; the first message is a header alone
        self._settings = _hash(config.settings)

    @property
    def bound_schema(self) -> BoundSchema:
        """Known once a batch has been balanced."""
        assert self.schema is not None
        return self.schema

    def step(self, raw: Raw, compute_ns: int = -1) -> Balanced | None:
        """Balances every rank's `raw`; None when the epoch is over for all of them.

        Raises the same kind of error on every rank. `compute_ns` is the time of an earlier step (see Planner).
        """
        timed = _Timed()
        with timed("split"):
            local = self._prepare(raw)
        self.pace.wait_for(1)
        with timed("stage1_gather_lengths"):
            heads, rows = self._gather_lengths(raw, local, compute_ns)
        if self._is_over(heads):
            return None
        self.pace.wait_for(2)
        with timed("stage2_gather_candidates"):
            content = self._gather_candidate_lengths(local, heads[:, _Head.SAMPLES], rows)
        step = self.num_steps
        with timed("plan"):
            plan, blocks, error = self._plan_and_pack(step, local, heads, rows, content)
        self.pace.wait_for(3)
        with timed("stage3_shuffle"):
            self._agree(plan, error)
            assert plan is not None
            assert blocks is not None
            batch, error = self._shuffle(raw, local, plan, blocks, rows)
        weights, totals = self._weights(plan, rows)
        self.num_steps += 1
        return Balanced(
            step=step,
            batch=batch,
            plan=plan,
            weights=weights,
            total_weights=totals,
            error=error,
            seconds=timed.seconds,
        )

    # ---- stage 1 ----------------------------------------------------------------------------------------------------

    def _prepare(self, raw: Raw) -> _Local:
        if raw.error is not None or raw.batch is None:
            return _Local(error=raw.error)
        try:
            schema = self.schema or self.config.schema.bind(raw.batch)
            split = schema.split(raw.batch)
            if not split.num_samples and self.schema is None:
                return _Local()  # too little to tell types from: another rank's batch will
            self.schema = schema
            rows = np.zeros((split.num_samples, len(_Row) + len(self.config.weights)), np.int64)
            rows[:, _Row.TOKENS] = self._lengths(raw.batch, split)
            rows[:, _Row.BYTES] = sum(c.sample_bytes() for c in split.columns)
            candidates, content_lengths = self.schema.candidates(split)
            rows[:, _Row.CANDIDATES] = candidates
            rows[:, _Row.GROUP] = self.schema.group_keys(raw.batch, split)
            for column, (task, fn) in enumerate(self.config.weights.items(), start=len(_Row)):
                weight = _per_sample(fn(raw.batch), split.num_samples, f"weights['{task}']", np.float64)
                if not (weight >= 0).all() or not np.isfinite(weight).all():
                    raise LoaderError(
                        f"weights['{task}'] must be finite and at least 0, got {weight.min()} to {weight.max()}"
                    )
                rows[:, column] = weight.view(np.int64)
            return _Local(split, rows, content_lengths)
        except Exception as e:
            return _Local(error=e)

    def _lengths(self, batch: Any, split: Split) -> Ints:
        assert self.schema is not None
        if self.config.length is None:
            return self.schema.history_lengths(split)
        lengths = _per_sample(self.config.length(batch), split.num_samples, "length", np.int64)
        if (lengths < 0).any():
            raise LoaderError(f"length must give numbers of at least 0, got {lengths.min()}")
        return lengths

    def _gather_lengths(self, raw: Raw, local: _Local, compute_ns: int) -> tuple[Ints, list[Ints]]:
        """Headers `(R, H)`, and for each rank its samples' rows `(B, 4 + T)`."""
        head = np.zeros(_HEAD_SIZE, np.int64)
        head[_Head.VERSION], head[_Head.SETTINGS] = _VERSION, self._settings
        head[_Head.SCHEMA] = self.schema.fingerprint if self.schema else 0
        head[_Head.STEP], head[_Head.SAMPLES] = self.num_steps, len(local.rows)
        head[_Head.STATUS] = _OK if local.error is None else _FAILED
        head[_Head.EXHAUSTED] = raw.batch is None and raw.error is None
        head[_Head.COMPUTE_NS] = compute_ns
        coefficients = self.planner.coefficients()
        head[_Head.COEFFICIENTS : _Head.COEFFICIENTS + len(coefficients)] = coefficients
        while True:
            heads, rows = self._exchange_heads(head, local.rows)
            self._check_heads(heads, local)
            needed = int(heads[:, _Head.SAMPLES].max())
            if needed <= self._capacity:
                break
            self._capacity = 1 << (needed - 1).bit_length()
        self._share_schema(heads)
        return heads, [r[:n] for r, n in zip(rows, heads[:, _Head.SAMPLES].tolist(), strict=True)]

    def _exchange_heads(self, head: Ints, rows: Ints) -> tuple[Ints, Ints]:
        width = len(_Row) + len(self.config.weights)
        message = np.zeros(_HEAD_SIZE + self._capacity * width, np.int64)
        message[:_HEAD_SIZE] = head
        if len(rows) <= self._capacity:
            message[_HEAD_SIZE : _HEAD_SIZE + rows.size] = rows.ravel()
        everyone = self.world.gather(message, f"stage 1 of batch {self.num_steps} (lengths)")
        return everyone[:, :_HEAD_SIZE], everyone[:, _HEAD_SIZE:].reshape(self.world.size, self._capacity, width)

    def _check_heads(self, heads: Ints, local: _Local) -> None:
        self._check_alike(
            heads[:, _Head.VERSION], lambda: f"protocol version {_VERSION}", "use one version of the library"
        )
        self._check_alike(
            heads[:, _Head.SETTINGS], lambda: self.config.settings, "start all ranks with the same settings"
        )
        self._raise_failures(heads[:, _Head.STATUS], local.error)
        self._check_alike(
            heads[:, _Head.STEP], lambda: f"batch {self.num_steps}", "load checkpoints of the same step on all ranks"
        )
        schemas = heads[:, _Head.SCHEMA]
        known = schemas[schemas != 0]
        if len(known) and (known != known[0]).any():
            filled = np.where(schemas == 0, known[0], schemas)
            self._check_alike(
                filled,
                lambda: self.schema.description if self.schema else "",
                "give all ranks batches of the same schema",
            )

    def _check_alike(self, values: Ints, text: Callable[[], str], way_out: str) -> None:
        """Raises Disagreement on every rank unless all `values` `(R,)` are equal."""
        odd = _odd_ranks(values)
        if not odd:
            return
        texts = gather_texts(self.world, text())
        most = next(r for r in range(len(values)) if r not in odd)
        lines = [f"rank {r} has {_first_difference(texts[r], texts[most])}" for r in odd]
        raise Disagreement(f"all ranks must agree: {'; '.join(lines)} of rank {most}; {way_out}")

    def _raise_failures(self, status: Ints, mine: BaseException | None) -> None:
        """Raises RankFailed on every rank if any has failed; the failed one's error is the cause there."""
        if not status.any():
            return
        failed = tuple(np.flatnonzero(status).tolist())
        texts = gather_texts(self.world, _say_error(mine) if mine else "")
        causes = "; ".join(f"rank {r} failed at batch {self.num_steps}: {texts[r]}" for r in failed)
        raise RankFailed(failed, causes) from mine

    def _share_schema(self, heads: Ints) -> None:
        """Ranks that never had a batch learn its schema from one that has."""
        schemas = heads[:, _Head.SCHEMA]
        if not schemas.any() or schemas.all():
            return
        data, error = b"", None
        try:
            data = pickle.dumps((self.schema.tree, self.schema.leaves)) if self.schema else b""
        except Exception as e:
            error = e
        self._raise_failures(
            self.world.gather(np.asarray([error is not None], np.int64), "the schema's status")[:, 0], error
        )
        sizes = self.world.gather(np.asarray([len(data)]), "the schema's size")[:, 0]
        padded = bytes_to_ints(data.ljust(int(sizes.max()), b"\0"))
        source = int(sizes.argmax())
        received = self.world.gather(padded, "the schema")[source].tobytes()[: sizes[source]]
        if self.schema is None:
            self.schema = self.config.schema.bind_to(*pickle.loads(received))

    def _is_over(self, heads: Ints) -> bool:
        exhausted = heads[:, _Head.EXHAUSTED] != 0
        if self.config.on_exhausted == "error" and exhausted.any() and not exhausted.all():
            ranks = np.flatnonzero(exhausted).tolist()
            raise Disagreement(
                f"ranks {ranks} have no batch {self.num_steps} while others have; on_exhausted='balance' spreads the "
                "rest over "
                "all ranks, 'stop' leaves it out"
            )
        return bool(exhausted.any() if self.config.on_exhausted == "stop" else exhausted.all())

    # ---- stage 2 ----------------------------------------------------------------------------------------------------

    def _gather_candidate_lengths(self, local: _Local, num_samples: Ints, rows: list[Ints]) -> Ints:
        """`(2, N)`: for each sample the sum, and the sum of squares, of its candidates' content lengths."""
        counts = [r[:, _Row.CANDIDATES] for r in rows]
        if self.schema is None or not self.schema.has_candidates:
            return np.zeros((2, int(num_samples.sum())), np.int64)
        room = max(int(c.sum()) for c in counts)
        message = np.zeros(room, np.int64)
        message[: len(local.content_lengths)] = local.content_lengths
        everyone = (
            self.world.gather(message, f"stage 2 of batch {self.num_steps} (candidate lengths)")
            if room
            else message[None]
        )
        return np.concatenate([_sums(lengths, c) for lengths, c in zip(everyone, counts, strict=False)], axis=1)

    # ---- the plan ---------------------------------------------------------------------------------------------------

    def _plan_and_pack(
        self, step: int, local: _Local, heads: Ints, rows: list[Ints], content: Ints
    ) -> tuple[Plan | None, Tensor | None, BaseException | None]:
        try:
            everyone = np.concatenate(rows)
            features = Features(
                rank=np.repeat(np.arange(self.world.size), heads[:, _Head.SAMPLES]),
                num_tokens=everyone[:, _Row.TOKENS],
                num_candidates=everyone[:, _Row.CANDIDATES],
                content_sum=content[0],
                content_sum_of_squares=content[1],
                num_bytes=everyone[:, _Row.BYTES],
                group=everyone[:, _Row.GROUP] if self.schema and self.schema.group else None,
            )
            plan = self.planner.plan(step, features, heads[:, _Head.COMPUTE_NS], heads[:, _Head.COEFFICIENTS :])
            return plan, self._pack(plan, local, rows), None
        except Exception as e:
            return None, None, e

    def _pack(self, plan: Plan, local: _Local, rows: list[Ints]) -> Tensor:
        me = self.world.rank
        sizes = self._block_sizes(plan, rows, sender=me)
        blocks = torch.empty(int(sizes.sum()), dtype=torch.uint8, device=_device(local))
        end = 0
        for peer, size in enumerate(sizes.tolist()):
            if size and local.split:
                pack(local.split.columns, plan.sent(me, peer), blocks[end : end + size])
            end += size
        return blocks

    def _block_sizes(
        self, plan: Plan, rows: list[Ints], *, sender: int | None = None, receiver: int | None = None
    ) -> Ints:
        """`(R,)` bytes from `sender` to each rank, or from each rank to `receiver`; samples that stay are not sent."""
        assert self.schema is not None
        num_columns = len(self.schema.specs)
        sizes = np.zeros(self.world.size, np.int64)
        for peer in range(self.world.size):
            source, target = (peer if sender is None else sender), (peer if receiver is None else receiver)
            if source != target:
                sizes[peer] = block_bytes(num_columns, rows[source][plan.sent(source, target), _Row.BYTES])
        return sizes

    def _agree(self, plan: Plan | None, error: BaseException | None) -> None:
        """The last gate before samples move: no rank has failed, and all have the same plan."""
        mine = np.asarray([_FAILED if error else _OK, plan.fingerprint if plan else 0])
        status, plans = self.world.gather(mine, f"agreement on the plan of batch {self.num_steps}").T
        self._raise_failures(status, error)
        self._check_alike(
            plans,
            lambda: f"plan {plan.fingerprint if plan else 0:016x}",
            "the partition function must be deterministic",
        )

    # ---- stage 3 ----------------------------------------------------------------------------------------------------

    def _shuffle(
        self, raw: Raw, local: _Local, plan: Plan, blocks: Tensor, rows: list[Ints]
    ) -> tuple[Any, BaseException | None]:
        me, size = self.world.rank, self.world.size
        assert self.schema is not None
        received = blocks
        recv_bytes = self._block_sizes(plan, rows, receiver=me)
        if plan.moves_anything:
            send_bytes = self._block_sizes(plan, rows, sender=me)
            received = self.world.shuffle(blocks, send_bytes.tolist(), recv_bytes.tolist())
        try:
            if local.split and plan.keeps_all(me):
                return raw.batch, None
            parts: list[list[Part]] = [[] for _ in self.schema.specs]
            end = 0
            for peer in range(size):
                index = plan.sent(peer, me)
                start, end = end, end + int(recv_bytes[peer])
                if peer == me:
                    columns = local.split.columns if local.split else [s.empty() for s in self.schema.specs]
                    here = [Part(c, index) for c in columns]
                else:
                    here = [Part.whole(c) for c in unpack(self.schema.specs, len(index), received[start:end])]
                for column_parts, part in zip(parts, here, strict=True):
                    column_parts.append(part)
            columns = [
                join(spec, p, pin_memory=self.pin_memory) for spec, p in zip(self.schema.specs, parts, strict=True)
            ]
            return self.schema.join(columns, local.split.tree if local.split else None), None
        except Exception as e:
            return None, e

    def _weights(self, plan: Plan, rows: list[Ints]) -> tuple[dict[str, NDArray[np.float64]], dict[str, float]]:
        everyone = np.concatenate(rows)
        is_copy = plan.is_copy[plan.received(self.world.rank)]
        sample = plan.sample[plan.received(self.world.rank)]
        weights = {"samples": np.where(is_copy, 0.0, 1.0)}
        totals = {"samples": float(len(everyone))}
        for column, task in enumerate(self.config.weights, start=len(_Row)):
            of_all = np.ascontiguousarray(everyone[:, column]).view(np.float64)
            weights[task] = np.where(is_copy, 0.0, of_all[sample])
            totals[task] = float(of_all.sum())
        return weights, totals


class _Timed:
    """Seconds of each stage, and a range of its name for `torch.profiler`."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextlib.contextmanager
    def __call__(self, stage: str) -> Generator[None]:
        start = time.perf_counter()
        with torch.profiler.record_function(f"fs_data::{stage}"):
            yield
        self.seconds[stage] = time.perf_counter() - start


def _per_sample(value: Any, num_samples: int, name: str, dtype: Any) -> NDArray[Any]:
    array = np.asarray(value.detach().cpu() if isinstance(value, Tensor) else value)
    if array.shape != (num_samples,):
        raise LoaderError(f"{name} must give one number a sample, so shape ({num_samples},), got {array.shape}")
    return array.astype(dtype)


def _sums(lengths: Ints, counts: Ints) -> Ints:
    """`(2, B)`: sums of `lengths` and of their squares over runs of `counts` `(B,)`."""
    ends = np.cumsum(counts)
    totals = np.stack([np.r_[0, np.cumsum(x)] for x in (lengths, lengths**2)])
    return totals[:, ends] - totals[:, ends - counts]


def _odd_ranks(values: Ints) -> list[int]:
    """The ranks whose value is not the most common one; ties go to the lowest rank's value."""
    found, first, count = np.unique(values, return_index=True, return_counts=True)
    most = found[np.lexsort((first, -count))[0]]
    return np.flatnonzero(values != most).tolist()


def _first_difference(mine: str, other: str) -> str:
    a, b = mine.splitlines() or [""], other.splitlines() or [""]
    width = max(len(a), len(b))
    a, b = a + [""] * (width - len(a)), b + [""] * (width - len(b))
    x, y = next(((x, y) for x, y in zip(a, b, strict=True) if x != y), (a[0], b[0]))
    return f"'{x}' in place of '{y}'"


def _say_error(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def _device(local: _Local) -> torch.device:
    return local.split.columns[0].values.device if local.split else torch.device("cpu")
