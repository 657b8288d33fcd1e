"""The process group: AllGather and AllToAll by our engine, all else by an inner gloo group.

Registered with torch.distributed as backend `"smfree"`. Methods have the names of torch 2.13 and those from before.
"""

# One method serves several of torch's spellings, whose parameters have other names in each version.
# pyright: reportAssignmentType=false, reportIncompatibleMethodOverride=false

import os
import time
import weakref
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, Store

from fs_comm.engine import INLINE_BYTES, Engine, Exchange
from fs_comm.errors import CommError
from fs_comm.mesh import Mesh
from fs_comm.transports import gloo
from fs_comm.transports.memory import Staging, allow_attach, read_from
from fs_comm.transports.verbs_road import VerbsRoad, why_not_verbs
from fs_comm.wire import DTYPE_NUMBER, Op
from fs_comm.work import ExchangeWork

BACKEND = "smfree"
TRANSPORTS = ("shm", "verbs", "gloo")

_live: "weakref.WeakSet[SmFreeGroup]" = weakref.WeakSet()
_DEFAULT_TIMEOUT_S = 300.0


def new_group(
    ranks: Sequence[int] | None = None,
    *,
    transports: Sequence[str] = TRANSPORTS,
    timeout_s: float = _DEFAULT_TIMEOUT_S,
) -> dist.ProcessGroup:
    """A process group whose AllGather and AllToAll take no multiprocessor; every rank of the job must call.

    Args:
        ranks: Global ranks; None takes all.
        transports: Those to choose from, in order of preference. `"shm"` serves groups whose ranks share a host,
            `"verbs"` those whose ranks all have an RDMA port, `"gloo"` any.
        timeout_s: Longest that a rank waits for another in one operation.

    Raises:
        ValueError: An unknown transport, or a number of seconds that is not positive.
        CommError: The ranks cannot reach each other.
    """
    if unknown := sorted(set(transports) - set(TRANSPORTS)):
        raise ValueError(f"transports must be of {TRANSPORTS}, got {unknown}")
    if timeout_s <= 0:
        raise ValueError(f"timeout_s must be more than 0, got {timeout_s}")
    register()
    _chosen["transports"] = tuple(transports)
    group = dist.new_group(ranks, timeout=timedelta(seconds=timeout_s), backend=BACKEND)
    assert not isinstance(group, int | None)
    return group


_chosen: dict[str, tuple[str, ...]] = {"transports": TRANSPORTS}


def register() -> None:
    """Makes backend `"smfree"` known to torch.distributed; once."""
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


class SmFreeGroup(dist.ProcessGroup):
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
        super().__init__(rank, size)  # pyright: ignore[reportCallIssue]  the form for subclasses, which stubs leave out
        self._rank, self._size, self._name = rank, size, ""
        self._global_ranks, self._timeout_s = tuple(global_ranks), timeout_s
        self._inner: Any = dist.ProcessGroupGloo(PrefixStore("inner", store), rank, size, timedelta(seconds=timeout_s))
        self._mesh = Mesh(
            PrefixStore("mesh", store),
            rank,
            size,
            timeout_s=timeout_s,
            name_of=lambda r: f"rank {global_ranks[r]}",
        )
        self.transport, self.transport_reason = self._choose(store, transports)
        attach = self.transport == "shm" and self._can_attach(store)
        staging = None
        if self.transport == "shm" and not attach:
            staging = Staging(rank, size, self._mesh.sockets, timeout_s)
        self.road = "attach" if attach else "staged" if staging else self.transport
        self._verbs = None
        if self.transport == "verbs":
            self._verbs = VerbsRoad(
                PrefixStore("verbs", store),
                rank,
                size,
                local_rank=self._local_rank(),
                timeout_s=timeout_s,
                check=self._mesh.check,
                name_of=self._mesh.name_of,
            )
        self._engine = Engine(
            self._mesh,
            timeout_s=timeout_s,
            attach=attach,
            staging=staging,
            elsewhere={"shm": None, "verbs": self._by_verbs, "gloo": self._by_gloo}[self.transport],
            on_end=self._verbs.close if self._verbs else lambda: None,
        )
        _live.add(self)

    def _choose(self, store: Store, transports: Sequence[str]) -> tuple[str, str]:
        """The first transport that serves all ranks, and why not those before it; the same on every rank."""
        why_not: list[str] = []
        for name in transports:
            reason = None
            if name == "shm" and len(set(self._mesh.hosts)) > 1:
                reason = "the ranks are on several hosts"
            elif name == "verbs" and self._size == 1:
                reason = "one rank has no peer"
            elif name == "verbs":
                reason = why_not_verbs(
                    PrefixStore("verbs", store), self._rank, self._size, local_rank=self._local_rank()
                )
            if reason is None:
                return name, "; ".join(why_not)
            why_not.append(f"{name}: {reason}")
        raise CommError(
            f"no transport of {list(transports)} serves these ranks: {'; '.join(why_not) or 'none is named'}"
        )

    def _local_rank(self) -> int:
        return self._mesh.hosts[: self._rank].count(self._mesh.host)

    def _can_attach(self, store: Store) -> bool:
        """Every rank tries to read every other; all take the same road."""
        if os.environ.get("FS_COMM_ATTACH") == "0":
            works = False
        else:
            allow_attach()
            works = True
        probe = torch.full((8,), self._rank, dtype=torch.uint8)
        store.set(f"probe{self._rank}", f"{probe.data_ptr()}|{int(works)}")
        for peer in range(self._size):
            address, allowed = store.get(f"probe{peer}").decode().split("|")
            out = torch.empty(8, dtype=torch.uint8)
            try:
                if peer != self._rank and works and allowed == "1":
                    read_from(self._mesh.pids[peer], int(address), out)
                    works = bool((out == peer).all())
                works = works and allowed == "1"
            except (OSError, CommError):
                works = False
        store.set(f"attach{self._rank}", str(int(works)))
        return all(store.get(f"attach{peer}") == b"1" for peer in range(self._size))

    def lost_ranks(self) -> dict[int, str]:
        """Global ranks of this group whose processes have ended."""
        return {self._global_ranks[p]: why for p, why in self._mesh.lost().items()}

    # What the engine does.

    def allgather(self, output_tensors: Any, input_tensors: Any, *args: Any, **kwargs: Any) -> dist.Work:
        if any(t.device.type != "cpu" for t in input_tensors):
            return self._inner.allgather(output_tensors, input_tensors, *args)
        (outputs,), (mine,) = output_tensors, input_tensors
        return self._gather(list(outputs), mine, output_tensors)

    def all_gather_single(self, output: Tensor, input: Tensor, *args: Any, **kwargs: Any) -> dist.Work:
        if input.device.type != "cpu":
            return self._inner._allgather_base(output, input, *args)
        if output.numel() != input.numel() * self._size or output.dtype != input.dtype:
            raise ValueError(
                f"all_gather needs an output of {self._size} times the input's {input.numel()} {input.dtype}, got "
                f"{output.numel()} {output.dtype}"
            )
        flat = output if output.is_contiguous() else torch.empty_like(output, memory_format=torch.contiguous_format)
        parts = list(flat.view(-1).chunk(self._size)) if output.numel() else [flat.view(-1)] * self._size
        return self._gather(parts, input, [output], finish=None if flat is output else lambda: output.copy_(flat))

    _allgather_base = all_gather_single

    def all_gather_single_coalesced(self, outputs: Any, inputs: Any, *args: Any, **kwargs: Any) -> dist.Work:
        works = [self.all_gather_single(o, i) for o, i in zip(outputs, inputs, strict=True)]
        return works[-1] if works else self._inner.barrier()  # in order: when the last is done, all are

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def all_to_all_single(
        self, output: Tensor, input: Tensor, output_split_sizes: Any, input_split_sizes: Any, *args: Any, **kwargs: Any
    ) -> dist.Work:
        if input.device.type != "cpu":
            return self._inner.alltoall_base(output, input, output_split_sizes, input_split_sizes, *args)
        if output.dtype != input.dtype:
            raise ValueError(f"all_to_all needs one dtype, got input {input.dtype} and output {output.dtype}")
        sends = self._split(input.contiguous(), input_split_sizes, "input")
        flat = output if output.is_contiguous() else torch.empty_like(output, memory_format=torch.contiguous_format)
        receives = self._split(flat, output_split_sizes, "output")
        finish = None if flat is output else lambda: output.copy_(flat)
        return self._exchange(Op.ALL_TO_ALL, sends, receives, [output], finish)

    alltoall_base = all_to_all_single

    def alltoall(self, output_tensors: Any, input_tensors: Any, *args: Any, **kwargs: Any) -> dist.Work:
        if any(t.device.type != "cpu" for t in input_tensors):
            return self._inner.alltoall(output_tensors, input_tensors, *args)
        flat = [
            t if t.is_contiguous() else torch.empty_like(t, memory_format=torch.contiguous_format)
            for t in output_tensors
        ]

        def finish() -> None:
            for out, copy in zip(output_tensors, flat, strict=True):
                if out is not copy:
                    out.copy_(copy)

        return self._exchange(
            Op.ALL_TO_ALL, [t.contiguous() for t in input_tensors], flat, list(output_tensors), finish
        )

    def _gather(self, outputs: list[Tensor], mine: Tensor, result: Any, finish: Any = None) -> dist.Work:
        if len(outputs) != self._size or any(o.numel() != mine.numel() or o.dtype != mine.dtype for o in outputs):
            raise ValueError(
                f"all_gather needs {self._size} outputs like its input, {mine.numel()} {mine.dtype}, got "
                f"{[(o.numel(), o.dtype) for o in outputs]}"
            )
        flat = [o if o.is_contiguous() else torch.empty_like(o, memory_format=torch.contiguous_format) for o in outputs]

        def copy_back() -> None:
            for out, copy in zip(outputs, flat, strict=True):
                if out is not copy:
                    out.copy_(copy)
            if finish is not None:
                finish()

        return self._exchange(Op.ALL_GATHER, [mine.contiguous()] * self._size, flat, result, copy_back)

    def _split(self, x: Tensor, sizes: Sequence[int], what: str) -> list[Tensor]:
        """By rows, evenly where no sizes are given."""
        num_rows = x.shape[0] if x.dim() else 0
        if not sizes:
            if num_rows % self._size:
                raise ValueError(f"{what} must have a number of rows that {self._size} ranks divide, got {num_rows}")
            sizes = [num_rows // self._size] * self._size
        if len(sizes) != self._size or sum(sizes) != num_rows:
            raise ValueError(
                f"{what} splits must be {self._size} numbers that add up to {num_rows} rows, got {list(sizes)}"
            )
        return list(x.split(list(sizes)))

    def _exchange(
        self, op: Op, sends: Sequence[Tensor], receives: Sequence[Tensor], result: Any, finish: Any
    ) -> ExchangeWork:
        exchange = Exchange(
            op,
            DTYPE_NUMBER[sends[0].dtype],
            [_bytes_of(t) for t in sends],
            [_bytes_of(t) for t in receives],
            finish or (lambda: None),
        )
        work = ExchangeWork(exchange, result, self._timeout_s)
        self._engine.submit(exchange)
        return work

    def _by_gloo(self, x: Exchange) -> None:
        """On the engine's thread, after all headers agreed; parts that came with the headers stay out."""
        gloo.exchange(self._inner, self._rank, x.send, x.receive, over_bytes=INLINE_BYTES)

    def _by_verbs(self, x: Exchange) -> None:
        """On the engine's thread, after all headers agreed; parts that came with the headers stay out."""
        assert self._verbs is not None
        if x.op == Op.ALL_GATHER:
            self._verbs.all_gather(x.receive)
        else:
            self._verbs.all_to_all(x.receive, x.send, over_bytes=INLINE_BYTES)

    # What the inner group does.

    def allreduce(self, *args: Any, **kwargs: Any) -> dist.Work:
        return self._inner.allreduce(*args, **kwargs)

    def allreduce_coalesced(self, *args: Any, **kwargs: Any) -> dist.Work:
        return self._inner.allreduce_coalesced(*args, **kwargs)

    def allgather_coalesced(self, *args: Any, **kwargs: Any) -> dist.Work:
        return self._inner.allgather_coalesced(*args, **kwargs)

    def barrier(self, *args: Any, **kwargs: Any) -> dist.Work:
        return self._inner.barrier()

    def broadcast(self, *args: Any, **kwargs: Any) -> dist.Work:
        return self._inner.broadcast(*args, **kwargs)

    def gather(self, *args: Any, **kwargs: Any) -> dist.Work:
        return self._inner.gather(*args, **kwargs)

    def scatter(self, *args: Any, **kwargs: Any) -> dist.Work:
        return self._inner.scatter(*args, **kwargs)

    def reduce(self, *args: Any, **kwargs: Any) -> dist.Work:
        return self._inner.reduce(*args, **kwargs)

    def reduce_scatter(self, *args: Any, **kwargs: Any) -> dist.Work:
        return self._inner.reduce_scatter(*args, **kwargs)

    def reduce_scatter_single(self, *args: Any, **kwargs: Any) -> dist.Work:
        return self._inner._reduce_scatter_base(*args, **kwargs)  # pyright: ignore[reportPrivateUsage]

    _reduce_scatter_base = reduce_scatter_single

    def send(self, *args: Any, **kwargs: Any) -> dist.Work:
        return self._inner.send(*args, **kwargs)

    def recv(self, *args: Any, **kwargs: Any) -> dist.Work:
        return self._inner.recv(*args, **kwargs)

    def recv_anysource(self, *args: Any, **kwargs: Any) -> dist.Work:
        return self._inner.recv_anysource(*args, **kwargs)

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

    def abort(self) -> None:
        self._engine.abort()


def _create(options: Any, backend_options: Any) -> SmFreeGroup:
    seconds = options.timeout.total_seconds()
    ranks = list(options.global_ranks_in_group) or list(range(options.group_size))
    return SmFreeGroup(
        options.store,
        options.group_rank,
        options.group_size,
        global_ranks=ranks,
        transports=_chosen["transports"],
        timeout_s=seconds if seconds > 0 else _DEFAULT_TIMEOUT_S,
    )


def _bytes_of(t: Tensor) -> Tensor:
    return t.detach().reshape(-1).view(torch.uint8) if t.numel() else torch.empty(0, dtype=torch.uint8)


def _after_fork() -> None:
    """A forked child must not hold the sockets open: peers would not see this process end."""
    for group in list(_live):
        for s in group._mesh.sockets.values():  # pyright: ignore[reportPrivateUsage]
            s.close()
    _live.clear()


os.register_at_fork(after_in_child=_after_fork)
