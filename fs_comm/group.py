"""The process group: AllGather and AllToAll by our engine, all else by an inner gloo group.

Registered with torch.distributed as backend `"smfree"`. Methods have the names of torch 2.13 and those from before.
"""

# One method serves several of torch's spellings, whose parameters have other names in each version.
# pyright: reportAssignmentType=false, reportIncompatibleMethodOverride=false

import atexit
import os
import threading
import time
import weakref
from collections.abc import Sequence
from contextvars import ContextVar
from datetime import timedelta
from functools import partial
from operator import index
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, Store

from fs_comm.cuda_road import CudaRoad
from fs_comm.engine import EXIT_S, Engine
from fs_comm.exchange import Exchange
from fs_comm.inner_group import WithInnerGroup
from fs_comm.mesh import Mesh
from fs_comm.roads import ROADS, open_roads, plan_routes, tell_all
from fs_comm.topology import TRANSPORTS, summary
from fs_comm.wire import DTYPE_NUMBER, Op
from fs_comm.work import CALLBACKS, ExchangeWork

BACKEND = "smfree"

_live: "weakref.WeakSet[SmFreeGroup]" = weakref.WeakSet()
_DEFAULT_TIMEOUT_S = 300.0
_SETUP_S = 60.0
"""How long ranks wait for each other while the group is made, at least: they may still be importing."""


def new_group(
    ranks: Sequence[int] | None = None,
    *,
    transports: Sequence[str] = TRANSPORTS,
    timeout_s: float = _DEFAULT_TIMEOUT_S,
) -> dist.ProcessGroup:
    """A process group whose AllGather and AllToAll take no multiprocessor; every rank of the job must call.

    Args:
        ranks: Global ranks; None takes all.
        transports: Those to choose from, in order of preference, for each two ranks by themselves. `"shm"` joins ranks
            that share a host, `"verbs"` those that both have an RDMA port, `"gloo"` any.
        timeout_s: Longest that a rank waits for another in one operation.

    Returns:
        The group; on a rank that is not of it, `dist.GroupMember.NON_GROUP_MEMBER`, as torch's `new_group`.

    Raises:
        ValueError: An unknown transport, or a number of seconds that is not positive.
        CommError: The ranks cannot reach each other.
    """
    if unknown := sorted(set(transports) - set(TRANSPORTS)):
        raise ValueError(f"transports must be of {TRANSPORTS}, got {unknown}")
    if timeout_s <= 0:
        raise ValueError(f"timeout_s must be more than 0, got {timeout_s}")
    register()
    token = _transports.set(tuple(transports))
    try:
        made: Any = dist.new_group(ranks, timeout=timedelta(seconds=timeout_s), backend=BACKEND)
    finally:
        _transports.reset(token)
    return made


_transports: ContextVar[tuple[str, ...]] = ContextVar("transports", default=TRANSPORTS)
"""Of the group that `new_group` is making: torch.distributed has no way to hand them through."""


def register() -> None:
    """Makes backend `"smfree"` known to torch.distributed; `import fs_comm` does."""
    if BACKEND.upper() not in dist.Backend._plugins:  # pyright: ignore[reportPrivateUsage]
        dist.Backend.register_backend(BACKEND, _create, extended_api=True, devices=["cpu", "cuda"])


def lost_ranks(timeout_s: float = 0.0) -> dict[int, str]:
    """Global ranks known to be gone, each with the reason; looks again for up to `timeout_s` until there is one.

    What to ask when a collective of any group fails: gloo and NCCL name an address at best.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        found = {rank: why for group in list(_live) for rank, why in group.lost_ranks().items()}
        if found or time.monotonic() >= deadline:
            return found
        time.sleep(0.05)


class SmFreeGroup(WithInnerGroup):
    """See `new_group`."""

    def __init__(
        self,
        store: Store,
        rank: int,
        size: int,
        *,
        global_ranks: Sequence[int],
        transports: Sequence[str],
        timeout_s: float,
    ) -> None:
        setup_s = max(timeout_s, _SETUP_S)
        super().__init__(PrefixStore("inner", store), rank, size, timeout_s=timeout_s, setup_s=setup_s)
        self._rank, self._size, self._name = rank, size, ""
        self._global_ranks, self._timeout_s = tuple(global_ranks), timeout_s
        self._mesh = Mesh(
            PrefixStore("mesh", store),
            rank,
            size,
            timeout_s=setup_s,
            name_of=lambda r: f"rank {global_ranks[r]}",
        )
        try:
            self.routes, wanted = plan_routes(PrefixStore("sites", store), self._mesh, transports, setup_s)
            """Group rank of each peer → the `Route` to it."""
            roads = open_roads(store, self._mesh, self.routes, wanted, setup_s)
            # Nobody goes on, and perhaps fails or leaves at once, while others are still connecting to it.
            tell_all(store, "open", self._mesh, None, setup_s)
        except BaseException:
            self._mesh.close(None)
            raise
        self._engine = Engine(
            self._mesh,
            timeout_s=timeout_s,
            roads=list(roads.values()),
            road_to={p: roads[route.road] for p, route in self.routes.items()},
        )
        apart = "the ranks are on several hosts" if len(set(self._mesh.hosts)) > 1 else None
        self._cuda = CudaRoad(
            PrefixStore("cuda", store),
            rank,
            size,
            why_apart=apart if "shm" in transports else "shm is not among the transports allowed",
            host=partial(self._host_engine, transports),
            timeout_s=timeout_s,
            setup_s=setup_s,
            name_of=self._mesh.name_of,
        )
        _live.add(self)

    def _host_engine(self, transports: Sequence[str], store: Store) -> Engine:
        """For what CUDA tensors need of CPU memory: of a group of its own, so that it keeps no order with ours."""
        self._for_cuda = SmFreeGroup(
            store,
            self._rank,
            self._size,
            global_ranks=self._global_ranks,
            transports=transports,
            timeout_s=self._timeout_s,
        )
        return self._for_cuda._engine

    @property
    def host(self) -> str:
        """Of this rank; equal for ranks that share memory."""
        return self._mesh.host

    @property
    def transport(self) -> str:
        """Those that join this rank to others, such as `shm` or `shm+gloo`; `none` where it has no peers."""
        return summary({r.transport for r in self.routes.values()}, TRANSPORTS)

    @property
    def cuda_mode(self) -> str:
        """How CUDA tensors are exchanged, see `CudaRoad.mode`."""
        return self._cuda.mode

    @property
    def road(self) -> str:
        """As `transport`, with shm's `attach` and `staged` told apart."""
        return summary({r.road for r in self.routes.values()}, ROADS)

    @property
    def transport_reason(self) -> str:
        """For each peer, why its route was taken, and none that was preferred to it."""
        return "\n".join(f"{self._mesh.name_of(p)}: {r.road}: {r.reason}" for p, r in self.routes.items())

    def lost_ranks(self) -> dict[int, str]:
        """Global ranks of this group whose processes have ended."""
        return {self._global_ranks[p]: why for p, why in self._mesh.lost().items()}

    # What the engine does.

    def allgather(self, output_tensors: Any, input_tensors: Any, *args: Any, **kwargs: Any) -> dist.Work:
        if self._goes_inside([*output_tensors[0], *input_tensors]):
            return self._inner.allgather(output_tensors, input_tensors, *args)
        (outputs,), (mine,) = output_tensors, input_tensors
        return self._gather(list(outputs), mine, output_tensors, waits=_waits(args))

    def all_gather_single(self, output: Tensor, input: Tensor, *args: Any, **kwargs: Any) -> dist.Work:
        if self._goes_inside([output, input]):
            return self._inner._allgather_base(output, input, *args)
        if output.numel() != input.numel() * self._size or output.dtype != input.dtype:
            raise ValueError(
                f"all_gather needs an output of {self._size} times the input's {input.numel()} {input.dtype}, got "
                f"{output.numel()} {output.dtype}"
            )
        flat = _room(output)
        parts = list(flat.view(-1).chunk(self._size)) if output.numel() else [flat.view(-1)] * self._size
        finish = None if flat is output else partial(_copy_back, [output], [flat])
        return self._gather(parts, input, [output], finish, waits=_waits(args))

    _allgather_base = all_gather_single

    def all_gather_single_coalesced(self, outputs: Any, inputs: Any, *args: Any, **kwargs: Any) -> dist.Work:
        works = [self.all_gather_single(o, i) for o, i in zip(outputs, inputs, strict=True)]
        return works[-1] if works else self._inner.barrier()  # in order: when the last is done, all are

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def allgather_coalesced(self, output_lists: Any, inputs: Any, *args: Any, **kwargs: Any) -> dist.Work:
        """`output_lists[r][k]` from rank r's `inputs[k]`."""
        works = [
            self.allgather([list(outs)], [x]) for outs, x in zip(zip(*output_lists, strict=True), inputs, strict=True)
        ]
        return works[-1] if works else self._inner.barrier()

    def all_to_all_single(
        self, output: Tensor, input: Tensor, output_split_sizes: Any, input_split_sizes: Any, *args: Any, **kwargs: Any
    ) -> dist.Work:
        if self._goes_inside([output, input]):
            return self._inner.alltoall_base(output, input, output_split_sizes, input_split_sizes, *args)
        if output.dtype != input.dtype:
            raise ValueError(f"all_to_all needs one dtype, got input {input.dtype} and output {output.dtype}")
        sends = self._split(_plain(input), input_split_sizes, "input")
        flat = _room(output)
        receives = self._split(flat, output_split_sizes, "output")
        finish = None if flat is output else partial(_copy_back, [output], [flat])
        return self._exchange(Op.ALL_TO_ALL, sends, receives, [output], finish, waits=_waits(args))

    alltoall_base = all_to_all_single

    def alltoall(self, output_tensors: Any, input_tensors: Any, *args: Any, **kwargs: Any) -> dist.Work:
        if self._goes_inside([*output_tensors, *input_tensors]):
            return self._inner.alltoall(output_tensors, input_tensors, *args)
        if any(t.dtype != output_tensors[0].dtype for t in (*output_tensors, *input_tensors)):
            found = sorted({str(t.dtype) for t in (*output_tensors, *input_tensors)})
            raise ValueError(f"all_to_all needs one dtype, got {found}")
        if len(output_tensors) != self._size or len(input_tensors) != self._size:
            raise ValueError(
                f"all_to_all needs {self._size} inputs and outputs, got {len(input_tensors)} and {len(output_tensors)}"
            )
        flat = [_room(t) for t in output_tensors]

        sends, finish = [_plain(t) for t in input_tensors], partial(_copy_back, output_tensors, flat)
        return self._exchange(Op.ALL_TO_ALL, sends, flat, list(output_tensors), finish, waits=_waits(args))

    def _gather(
        self, outputs: list[Tensor], mine: Tensor, result: Any, finish: Any = None, *, waits: bool
    ) -> dist.Work:
        fits = len(outputs) == self._size and all(o.dtype == mine.dtype for o in outputs)
        if not fits or outputs[self._rank].numel() != mine.numel():  # other ranks' sizes are theirs to know
            raise ValueError(
                f"all_gather needs {self._size} outputs of its input's dtype, this rank's own of its size, "
                f"{mine.numel()} {mine.dtype}, got {[(o.numel(), o.dtype) for o in outputs]}"
            )
        flat = [_room(o) for o in outputs]

        def copy_back() -> None:
            _copy_back(outputs, flat)
            if finish is not None:
                finish()

        return self._exchange(Op.ALL_GATHER, [_plain(mine)] * self._size, flat, result, copy_back, waits=waits)

    def _split(self, x: Tensor, sizes: Sequence[int] | None, what: str) -> list[Tensor]:
        """By rows, evenly where no sizes are given."""
        num_rows = x.shape[0] if x.dim() else 0
        sizes = [] if sizes is None else [index(n) for n in sizes]  # also of a tensor, or an array
        if not sizes:
            if num_rows % self._size:
                raise ValueError(f"{what} must have a number of rows that {self._size} ranks divide, got {num_rows}")
            sizes = [num_rows // self._size] * self._size
        if len(sizes) != self._size or sum(sizes) != num_rows:
            raise ValueError(f"{what} splits must be {self._size} numbers that add up to {num_rows} rows, got {sizes}")
        return list(x.split(sizes))

    def _goes_inside(self, tensors: Sequence[Tensor]) -> bool:
        """Whether the inner group does it: for devices that we have no road for."""
        for t in tensors:
            if t.layout != torch.strided or t.is_nested:
                raise ValueError(
                    f"tensors must be dense, got a {'nested' if t.is_nested else t.layout} one: gather its values"
                )
        return any(t.device.type != "cpu" for t in tensors) and not self._cuda.serves(tensors)

    def _exchange(
        self, op: Op, sends: Sequence[Tensor], receives: Sequence[Tensor], result: Any, finish: Any, *, waits: bool
    ) -> dist.Work:
        if sends[self._rank].numel() != receives[self._rank].numel():
            raise ValueError(
                f"what a rank sends to itself must be what it receives: {sends[self._rank].numel()} elements, "
                f"{receives[self._rank].numel()} expected"
            )
        if sends[0].is_cuda:
            return self._cuda.exchange(op, sends, receives, result, finish)
        exchange = Exchange(
            op,
            DTYPE_NUMBER[sends[0].dtype],
            [_bytes_of(t) for t in sends],
            [_bytes_of(t) for t in receives],
            finish or (lambda: None),
        )
        work = ExchangeWork(exchange, result, self._timeout_s)
        if waits:
            self._engine.run(exchange)
        else:
            self._engine.submit(exchange)
        return work

    # What torch.distributed asks of a group.

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size

    def name(self) -> str:
        return BACKEND

    def getBackendName(self) -> str:
        return BACKEND

    def _set_group_name(self, name: str) -> None:
        self._name = name

    @property
    def group_name(self) -> str:  # pyright: ignore[reportIncompatibleMethodOverride]
        return self._name

    def shutdown(self) -> None:
        self._engine.close()
        self._cuda.close()

    def abort(self) -> None:
        self._engine.abort()
        self._cuda.abort()


def _create(options: Any, backend_options: Any) -> SmFreeGroup:
    seconds = options.timeout.total_seconds()
    ranks = list(options.global_ranks_in_group) or list(range(options.group_size))
    return SmFreeGroup(
        options.store,
        options.group_rank,
        options.group_size,
        global_ranks=ranks,
        transports=_transports.get(),
        timeout_s=seconds if seconds > 0 else _DEFAULT_TIMEOUT_S,
    )


def _waits(args: tuple[Any, ...]) -> bool:
    """Whether the caller will do nothing but wait: `async_op=False`, as the options of an operation say it."""
    return bool(args) and not getattr(args[0], "asyncOp", True)


def _plain(t: Tensor) -> Tensor:
    """The same values, lying in memory as they are read."""
    return t.contiguous().resolve_conj().resolve_neg()


def _room(t: Tensor) -> Tensor:
    """Contiguous memory for `t`'s values: its own where it can be.

    Raises:
        ValueError: Several of its elements are one place in memory.
    """
    if t.numel() and any(n > 1 and not step for n, step in zip(t.shape, t.stride(), strict=True)):
        raise ValueError(
            f"an output must have a place for each element, got shape {[*t.shape]}, strides {[*t.stride()]}"
        )
    if t.is_contiguous() and not t.is_conj() and not t.is_neg():
        return t
    return torch.empty(t.shape, dtype=t.dtype, device=t.device)


def _copy_back(outputs: Sequence[Tensor], flat: Sequence[Tensor]) -> None:
    """From `_room`, where that is not the output's own."""
    for out, room in zip(outputs, flat, strict=True):
        if out is not room:
            out.copy_(room)


def _bytes_of(t: Tensor) -> Tensor:
    return t.detach().reshape(-1).view(torch.uint8) if t.numel() else torch.empty(0, dtype=torch.uint8)


def _after_fork() -> None:
    """A forked child has no part in its parent's groups."""
    for group in list(_live):
        group._cuda.after_fork()  # pyright: ignore[reportPrivateUsage]
        group._engine.after_fork()  # pyright: ignore[reportPrivateUsage]
    _live.clear()


def _at_exit() -> None:
    for group in list(_live):
        group._engine.at_exit()  # pyright: ignore[reportPrivateUsage]
    deadline = time.monotonic() + EXIT_S
    for thread in threading.enumerate():
        if thread.name == CALLBACKS:
            thread.join(max(0.0, deadline - time.monotonic()))


os.register_at_fork(after_in_child=_after_fork)
atexit.register(_at_exit)
