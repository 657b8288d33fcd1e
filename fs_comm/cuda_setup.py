"""Makes a group's engine for CUDA tensors, or says why the ranks cannot have one."""

import os
from collections.abc import Callable
from datetime import timedelta

import torch
from torch._C._distributed_c10d import Store

from fs_comm.cuda_copies import CudaCopies
from fs_comm.cuda_engine import CudaEngine
from fs_comm.driver import DriverError
from fs_comm.mesh import Mesh
from fs_comm.staging import Layout, Region, share

STAGING_BYTES = 48 << 20
"""Of a rank, about; every rank of the host registers every rank's."""
NUM_SLOTS = 4
MAX_SLOT_BYTES = 4 << 20
"""Small copies of others wait for one chunk in the copy engine; a chunk of 4 MiB takes 80 µs at 55 GB/s."""


def layout_for(size: int) -> Layout:
    """As many slots in a lane as keep both copy engines busy, of equal size, within the bound for all lanes."""
    share_of_slot = STAGING_BYTES // (NUM_SLOTS * (size + 1))
    slot_bytes = max(64 << 10, min(MAX_SLOT_BYTES, share_of_slot // (64 << 10) * (64 << 10)))
    return Layout(size, slot_bytes, NUM_SLOTS)


def start(
    store: Store, rank: int, size: int, device: torch.device, *, timeout_s: float, name_of: Callable[[int], str]
) -> CudaEngine | str:
    """Every rank of the group calls, and all get an engine, or all a reason why not.

    `FS_COMM_STREAM_WAITS=0` keeps this rank's streams from waiting on memory: a thread looks instead.
    """
    mesh = Mesh(store, rank, size, timeout_s=timeout_s, name_of=name_of)
    if len(set(mesh.hosts)) > 1:
        mesh.close(None)
        return "the ranks are on several hosts"
    layout = layout_for(size)
    regions = share(layout, rank, mesh.sockets, timeout_s)
    copies = CudaCopies(device, stream_waits=False if os.environ.get("FS_COMM_STREAM_WAITS") == "0" else None)
    reason = _register(copies, regions)
    store.set(f"registered{rank}", reason)
    store.wait([f"registered{r}" for r in range(size)], timedelta(seconds=timeout_s))
    reasons = [store.get(f"registered{r}").decode() for r in range(size)]
    if any(reasons):
        mesh.close(None)
        copies.close()
        for region in regions:
            region.close()
        return "; ".join(f"{name_of(r)}: {why}" for r, why in enumerate(reasons) if why)
    return CudaEngine(mesh, layout, regions, copies, timeout_s=timeout_s)


def _register(copies: CudaCopies, regions: list[Region]) -> str:
    """Empty, or what went wrong."""
    try:
        for region in regions:
            copies.register(region.address, region.layout.num_bytes, region.layout.scratch)
    except DriverError as error:
        return str(error)
    return ""
