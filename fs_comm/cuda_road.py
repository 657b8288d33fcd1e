"""A group's exchanges of CUDA tensors: makes the engine that serves its ranks at the first of them."""

import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, Store

from fs_comm.cuda_copies import CudaCopies
from fs_comm.cuda_engine import CudaEngine
from fs_comm.cuda_pinned import Host, PinnedEngine
from fs_comm.cuda_work import CudaWork
from fs_comm.driver import DriverError
from fs_comm.errors import GroupClosed
from fs_comm.mesh import Mesh
from fs_comm.roads import is_forbidden
from fs_comm.staging import Layout, Region, share
from fs_comm.wire import DTYPE_NUMBER, Op

STAGING_BYTES = 96 << 20
"""Of a rank, at most; every rank of the host registers every rank's."""
NUM_SLOTS = 4
MAX_SLOT_BYTES = 4 << 20
"""Small copies of others wait for one chunk in the copy engine; a chunk of 4 MiB takes 80 µs at 55 GB/s."""


class CudaRoad:
    """Made by every rank of the group; nothing happens before the first CUDA tensor, which every rank must bring.

    Args:
        why_apart: Why the ranks cannot share memory; None where they may.
        host: Makes what carries segments between ranks that do not share memory; every rank calls it then.
        setup_s: How long ranks wait for each other at the first operation.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        size: int,
        *,
        why_apart: str | None,
        host: Callable[[Store], Host],
        timeout_s: float,
        setup_s: float,
        name_of: Callable[[int], str],
    ) -> None:
        self._store, self._rank, self._size = store, rank, size
        self._host, self._timeout_s, self._setup_s, self._name_of = host, timeout_s, setup_s, name_of
        self.why_apart = why_apart
        self._starting = threading.Lock()
        self._engine: CudaEngine | PinnedEngine | None = None
        self._closed = False

    @property
    def mode(self) -> str:
        """`"streams wait"`, `"thread waits"`, `"pinned"` where ranks share no memory, `"unused"` before the first."""
        if self._engine is None:
            return "unused"
        if isinstance(self._engine, PinnedEngine):
            return "pinned"
        return "streams wait" if self._engine.copies.stream_waits else "thread waits"

    def serves(self, tensors: Sequence[Tensor]) -> bool:
        """Whether these, of which one is on no CPU, are exchanged here; the first call waits for all ranks."""
        devices = {t.device for t in tensors}
        if len(devices) > 1:
            raise ValueError(f"all tensors of an operation must be on one device, got {sorted(map(str, devices))}")
        (device,) = devices
        if device.type != "cuda" or torch.version.hip is not None:
            return False
        with self._starting:
            if self._closed:
                raise GroupClosed("the group was shut down, or failed before; make a new one")
            if self._engine is None:
                try:
                    self._engine = self._start(device)
                except BaseException:
                    self._closed = True
                    raise
        if self._engine.device != device:
            raise ValueError(f"a group exchanges tensors of one device, {self._engine.device} so far; got {device}")
        return True

    def _start(self, device: torch.device) -> CudaEngine | PinnedEngine:
        rank, size, timeout_s, setup_s = self._rank, self._size, self._timeout_s, self._setup_s
        # None: try. With "0" a thread looks at memory in place of the streams, on this rank alone.
        copies = CudaCopies(device, stream_waits=False if is_forbidden("FS_COMM_STREAM_WAITS") else None)
        if self.why_apart is None:
            mesh = Mesh(PrefixStore("mesh", self._store), rank, size, timeout_s=setup_s, name_of=self._name_of)
            layout = layout_for(size)
            regions = share(layout, rank, mesh.sockets, setup_s)
            self._store.set(f"registered{rank}", _register(copies, regions))
            self._store.wait([f"registered{r}" for r in range(size)], timedelta(seconds=setup_s))
            reasons = [self._store.get(f"registered{r}").decode() for r in range(size)]
            if not any(reasons):
                return CudaEngine(mesh, layout, regions, copies, device, timeout_s=timeout_s)
            self.why_apart = "; ".join(f"{self._name_of(r)}: {why}" for r, why in enumerate(reasons) if why)
            mesh.close(None)
            copies.unregister()
            for region in regions:
                region.close()
        host = self._host(PrefixStore("host", self._store))
        return PinnedEngine(host, rank, size, copies, device, timeout_s=timeout_s)

    def exchange(
        self,
        op: Op,
        sends: Sequence[Tensor],
        receives: Sequence[Tensor],
        result: Any,
        finish: Callable[[], None] | None,
    ) -> CudaWork:
        """As `CudaEngine.submit`, for tensors that `serves` has seen."""
        engine = self._engine
        assert engine is not None
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError("an exchange with other processes cannot be captured into a CUDA graph")

        def finish_on_copies() -> None:
            with torch.cuda.stream(engine.copies.last), torch.inference_mode():
                if finish is not None:
                    finish()

        with torch.cuda.device(engine.device):
            job = engine.submit(
                op, DTYPE_NUMBER[sends[0].dtype], sends, receives, finish_on_copies if finish is not None else None
            )
            return CudaWork(engine, job, result)

    def close(self) -> None:
        with self._starting:
            self._closed = True
        if self._engine is not None:
            self._engine.close()

    def abort(self) -> None:
        with self._starting:
            self._closed = True
        if self._engine is not None:
            self._engine.abort()

    def after_fork(self) -> None:
        """A forked child must not hold the sockets open."""
        if self._engine is not None:
            self._engine.close_sockets()


def layout_for(size: int) -> Layout:
    """As many slots in a lane as keep both copy engines busy, of equal size, within the bound for all lanes."""
    share_of_slot = STAGING_BYTES // (NUM_SLOTS * (size + 1))
    slot_bytes = max(64 << 10, min(MAX_SLOT_BYTES, share_of_slot // (64 << 10) * (64 << 10)))
    return Layout(size, slot_bytes, NUM_SLOTS)


def _register(copies: CudaCopies, regions: list[Region]) -> str:
    """Empty, or what went wrong."""
    try:
        for region in regions:
            region.device_address = copies.register(region.address, region.layout.num_bytes, Layout.scratch)
    except DriverError as error:
        return str(error)
    return ""
