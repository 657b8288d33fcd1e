"""The three stages of balancing (paper, Algorithm 1): gather lengths, gather candidate lengths, plan, shuffle samples.

Every decision that leads to a collective is made from gathered numbers alone, so all ranks take the same path: a rank
that failed says so in its header, and all raise the same error.

Legend: R ranks, N samples of all ranks, B samples of one rank, T tasks with loss weights.
"""

import contextlib
import hashlib
import pickle
import time
from collections.abc import Generator
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fs_data.agree import check_alike, raise_failures
from fs_data.blocks import device_of, pack_all, unpack_all
from fs_data.column import Part, join
from fs_data.errors import Disagreement
from fs_data.hooks import Pace
from fs_data.local import Held, Local, Measures, RowField, features_of, prepare, sums_of_candidates, weights_of
from fs_data.pack import block_bytes, pack, unpack
from fs_data.planner import Planner
from fs_data.schema import BatchSchema, BoundSchema
from fs_data.shuffle_plan import Plan
from fs_data.world import World, bytes_to_ints

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
    FAILED = 5
    EXHAUSTED = 6
    LAST = 7
    COMPUTE_NS = 8
    COEFFICIENTS = 9  # four of them


_HEAD_SIZE = 13


@dataclass(frozen=True, kw_only=True)
class ExchangeConfig:
    schema: BatchSchema
    measures: Measures
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
    is_last: bool = False
    """Whether the wrapped loader has no batch after this one, where that is known."""
    drawn: torch.cuda.Event | None = None
    """When a batch on a GPU is complete."""
    wait_s: float = 0.0
    """How long the exchange waited for the wrapped loader."""


@dataclass(kw_only=True)
class Balanced:
    """One rank's part of a balanced global batch."""

    step: int
    """Counts the batches of the loader's life."""
    step_in_pass: int
    batch: Any
    plan: Plan
    weights: dict[str, NDArray[np.float64]]
    """`(n,)` loss weights of this rank's samples for each task; copies that only fill up a rank weigh 0."""
    total_weights: dict[str, float]
    """Sums over all ranks."""
    held: Held | None
    """Samples that wait on this rank after this step."""
    planner_state: dict[str, Any]
    """What the partition function and the cost model remember after planning it."""
    error: BaseException | None = None
    """What went wrong on this rank alone, after the samples had been exchanged."""
    seconds: dict[str, float] = field(default_factory=dict[str, float])
    """By stage."""


class Exchange:
    """Runs the stages, batch after batch, for one loader; every call of `step` is collective."""

    def __init__(self, world: World, config: ExchangeConfig, planner: Planner) -> None:
        self.world, self.config, self.planner = world, config, planner
        self.schema: BoundSchema | None = None
        self.num_steps = 0
        self.num_in_pass = 0
        self.held: Held | None = None
        self.pace = Pace()
        self.pin_memory = False
        """Whether exchanged samples are joined in pinned memory, for a copy to the device that overlaps."""
        self._capacity = 0  # samples a rank's message has room for; the first message is a header alone
        self._settings = int.from_bytes(hashlib.blake2b(config.settings.encode(), digest_size=7).digest(), "little")

    @property
    def bound_schema(self) -> BoundSchema:
        """Known once a batch has been balanced."""
        assert self.schema is not None
        return self.schema

    def step(self, raw: Raw, compute_ns: int = -1) -> Balanced | None:
        """Balances every rank's `raw`; None when the pass is over for all of them.

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
            content = self._gather_candidate_lengths(local, rows)
        with timed("plan"):
            plan, blocks, error = self._plan_and_pack(local, heads, rows, content)
        self.pace.wait_for(3)
        with timed("stage3_shuffle"):
            self._agree(plan, error)
            assert plan is not None
            assert blocks is not None
            batch, error = self._shuffle(raw, local, plan, blocks, rows)
        weights, totals = self._weights(plan, rows)
        self.held = local.keep(plan.deferred_here(self.world.rank))
        self.num_steps += 1
        self.num_in_pass += 1
        return Balanced(
            step=self.num_steps - 1,
            step_in_pass=self.num_in_pass - 1,
            batch=batch,
            plan=plan,
            weights=weights,
            total_weights=totals,
            held=self.held,
            planner_state=self.planner.state_dict(),
            error=error,
            seconds=timed.seconds,
        )

    def _prepare(self, raw: Raw) -> Local:
        nothing = np.zeros((0, self.config.measures.width), np.int64)
        if raw.error is not None:
            return Local(nothing, error=raw.error)
        try:
            local = Local(nothing)
            if raw.batch is not None:
                schema = self.schema or self.config.schema.bind(raw.batch)
                found = prepare(raw.batch, schema, self.config.measures)
                if len(found.rows) or self.schema is not None:
                    local, self.schema = found, schema  # an empty first batch is too little to tell types from
            return self.held.before(local) if self.held else local
        except Exception as e:
            return Local(nothing, error=e)

    # ---- stage 1 ----------------------------------------------------------------------------------------------------

    def _gather_lengths(self, raw: Raw, local: Local, compute_ns: int) -> tuple[Ints, list[Ints]]:
        """Headers `(R, H)`, and for each rank its samples' rows `(B, 5 + T)`."""
        head = np.zeros(_HEAD_SIZE, np.int64)
        head[_Head.VERSION], head[_Head.SETTINGS] = _VERSION, self._settings
        head[_Head.SCHEMA] = self.schema.fingerprint if self.schema else 0
        head[_Head.STEP], head[_Head.SAMPLES] = self.num_steps, len(local.rows)
        head[_Head.FAILED] = local.error is not None
        head[_Head.EXHAUSTED] = raw.batch is None
        head[_Head.LAST] = raw.is_last or raw.batch is None
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
        width = self.config.measures.width
        message = np.zeros(_HEAD_SIZE + self._capacity * width, np.int64)
        message[:_HEAD_SIZE] = head
        if len(rows) <= self._capacity:
            message[_HEAD_SIZE : _HEAD_SIZE + rows.size] = rows.ravel()
        everyone = self.world.gather(message, f"stage 1 of batch {self.num_steps} (lengths)")
        return everyone[:, :_HEAD_SIZE], everyone[:, _HEAD_SIZE:].reshape(self.world.size, self._capacity, width)

    def _check_heads(self, heads: Ints, local: Local) -> None:
        def alike(values: Ints, text: str, way_out: str) -> None:
            check_alike(self.world, values, lambda: text, way_out)

        alike(heads[:, _Head.VERSION], f"protocol version {_VERSION}", "use one version of the library")
        alike(heads[:, _Head.SETTINGS], self.config.settings, "start all ranks with the same settings")
        raise_failures(self.world, heads[:, _Head.FAILED], local.error, f"batch {self.num_steps}")
        alike(heads[:, _Head.STEP], f"batch {self.num_steps}", "load checkpoints of the same step on all ranks")
        schemas = heads[:, _Head.SCHEMA]
        known = schemas[schemas != 0]
        if len(known) and (known != known[0]).any():  # a rank that never had a batch has no schema
            mine = self.schema.description if self.schema else ""
            alike(np.where(schemas == 0, known[0], schemas), mine, "give all ranks batches of the same schema")

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
        mine = np.asarray([error is not None, len(data)], np.int64)
        failed, sizes = self.world.gather(mine, "the schema's size").T
        raise_failures(self.world, failed, error, f"batch {self.num_steps}")
        source = int(sizes.argmax())
        everyone = self.world.gather(bytes_to_ints(data.ljust(int(sizes.max()), b"\0")), "the schema")
        if self.schema is None:
            self.schema = self.config.schema.bind_to(*pickle.loads(everyone[source].tobytes()[: sizes[source]]))

    def _is_over(self, heads: Ints) -> bool:
        exhausted = heads[:, _Head.EXHAUSTED] != 0
        if self.config.on_exhausted == "error" and exhausted.any() and not exhausted.all():
            raise Disagreement(
                f"ranks {np.flatnonzero(exhausted).tolist()} have no batch {self.num_steps} while others have; "
                "on_exhausted='balance' spreads the rest over all ranks, 'stop' leaves it out"
            )
        if self.config.on_exhausted == "stop" and exhausted.any():
            return True
        return bool(exhausted.all())

    def _is_last(self, heads: Ints) -> bool:
        last = heads[:, _Head.LAST] != 0
        return bool(last.all() or (self.config.on_exhausted == "stop" and last.any()))

    # ---- stage 2 ----------------------------------------------------------------------------------------------------

    def _gather_candidate_lengths(self, local: Local, rows: list[Ints]) -> Ints:
        """`(2, N)`: for each sample the sum, and the sum of squares, of its candidates' content lengths."""
        counts = [r[:, RowField.CANDIDATES] for r in rows]
        room = max(int(c.sum()) for c in counts)
        if not room:
            return np.zeros((2, sum(map(len, counts))), np.int64)
        message = np.zeros(room, np.int64)
        message[: len(local.content_lengths)] = local.content_lengths
        everyone = self.world.gather(message, f"stage 2 of batch {self.num_steps} (candidate lengths)")
        return np.concatenate([sums_of_candidates(x, c) for x, c in zip(everyone, counts, strict=True)], axis=1)

    # ---- the plan ---------------------------------------------------------------------------------------------------

    def _plan_and_pack(
        self, local: Local, heads: Ints, rows: list[Ints], content: Ints
    ) -> tuple[Plan | None, Tensor | None, BaseException | None]:
        try:
            features = features_of(rows, content, has_groups=self.config.schema.group is not None)
            plan = self.planner.plan(
                self.num_steps,
                features,
                heads[:, _Head.COMPUTE_NS],
                heads[:, _Head.COEFFICIENTS :],
                batch=self.num_in_pass,
                is_last=self._is_last(heads),
            )
            return plan, self._pack(plan, local, rows), None
        except Exception as e:
            return None, None, e

    def _pack(self, plan: Plan, local: Local, rows: list[Ints]) -> Tensor:
        me = self.world.rank
        sizes = self._block_sizes(plan, rows, sender=me)
        device = device_of(local.columns or [])
        if device.type == "cuda" and local.columns is not None:
            nothing = np.zeros(0, np.int64)
            sent = [nothing if peer == me else plan.sent(me, peer) for peer in range(self.world.size)]
            return pack_all(local.columns, sent, sizes.tolist())
        blocks = torch.empty(int(sizes.sum()), dtype=torch.uint8)
        for peer, block in enumerate(blocks.split(sizes.tolist())):
            if len(block) and local.columns is not None:
                pack(local.columns, plan.sent(me, peer), block)
        return blocks

    def _block_sizes(
        self, plan: Plan, rows: list[Ints], *, sender: int | None = None, receiver: int | None = None
    ) -> Ints:
        """`(R,)` bytes from `sender` to each rank, or from each rank to `receiver`; samples that stay are not sent."""
        num_columns = len(self.bound_schema.specs)
        sizes = np.zeros(self.world.size, np.int64)
        for peer in range(self.world.size):
            source, target = (peer if sender is None else sender), (peer if receiver is None else receiver)
            if source != target:
                sizes[peer] = block_bytes(num_columns, rows[source][plan.sent(source, target), RowField.BYTES])
        return sizes

    def _agree(self, plan: Plan | None, error: BaseException | None) -> None:
        """The last gate before samples move: no rank has failed, and all have the same plan."""
        fingerprint = plan.fingerprint if plan else 0
        mine = np.asarray([error is not None, fingerprint], np.int64)
        failed, plans = self.world.gather(mine, f"agreement on the plan of batch {self.num_steps}").T
        raise_failures(self.world, failed, error, f"batch {self.num_steps}")
        check_alike(
            self.world, plans, lambda: f"plan {fingerprint:016x}", "the partition function must be deterministic"
        )

    # ---- stage 3 ----------------------------------------------------------------------------------------------------

    def _shuffle(
        self, raw: Raw, local: Local, plan: Plan, blocks: Tensor, rows: list[Ints]
    ) -> tuple[Any, BaseException | None]:
        me = self.world.rank
        recv_bytes = self._block_sizes(plan, rows, receiver=me).tolist()
        received = blocks
        if plan.moves_anything:
            send_bytes = self._block_sizes(plan, rows, sender=me).tolist()
            received = self.world.shuffle(blocks, send_bytes, recv_bytes)
        try:
            if local.is_batch and plan.keeps_all(me):
                return raw.batch, None
            if received.is_cuda:
                return self._join_on_device(local, plan, received, recv_bytes, rows), None
            return self._join(local, plan, received.split(recv_bytes)), None
        except Exception as e:
            return None, e

    def _join(self, local: Local, plan: Plan, blocks: tuple[Tensor, ...] | list[Tensor]) -> Any:
        """The batch of what this rank keeps and what came in `blocks`, one from each rank, in global order."""
        me, specs = self.world.rank, self.bound_schema.specs
        parts: list[list[Part]] = [[] for _ in specs]
        for peer, block in enumerate(blocks):
            index = plan.sent(peer, me)
            if peer == me:
                here = [Part(c, index) for c in local.columns or [s.empty() for s in specs]]
            else:
                here = [Part.whole(c) for c in unpack(specs, len(index), block)]
            for column_parts, part in zip(parts, here, strict=True):
                column_parts.append(part)
        columns = [join(spec, p, pin_memory=self.pin_memory) for spec, p in zip(specs, parts, strict=True)]
        return self.bound_schema.join(columns, local.tree)

    def _join_on_device(
        self, local: Local, plan: Plan, received: Tensor, recv_bytes: list[int], rows: list[Ints]
    ) -> Any:
        """The same on a GPU, where what this rank keeps becomes one more block, behind those that came."""
        me, specs = self.world.rank, self.bound_schema.specs
        samples = [plan.sent(peer, me) for peer in range(self.world.size)]
        counts = np.asarray([len(s) for s in samples])
        places = np.split(np.arange(counts.sum()), np.cumsum(counts)[:-1])
        kept, kept_places, counts[me] = samples[me], places.pop(me), 0
        kept_bytes = block_bytes(len(specs), rows[me][kept, RowField.BYTES])
        blocks = received
        if local.columns is not None:
            blocks = torch.cat([received, pack_all(local.columns, [kept], [kept_bytes])])
        order = np.concatenate([*places, kept_places])
        columns = unpack_all(specs, blocks, [*counts.tolist(), len(kept)], [*recv_bytes, kept_bytes], order)
        return self.bound_schema.join(columns, local.tree)

    def _weights(self, plan: Plan, rows: list[Ints]) -> tuple[dict[str, NDArray[np.float64]], dict[str, float]]:
        everyone, here = np.concatenate(rows), plan.received(self.world.rank)
        trained = plan.sample[~plan.is_copy]
        of_all = {"samples": np.ones(len(everyone))}
        of_all |= {task: weights_of(everyone, i) for i, task in enumerate(self.config.measures.weights)}
        mine = {task: np.where(plan.is_copy[here], 0.0, w[plan.sample[here]]) for task, w in of_all.items()}
        return mine, {task: float(w[np.sort(trained)].sum()) for task, w in of_all.items()}


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
