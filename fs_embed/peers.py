"""The collectives of one exchange thread, over any process group or over none (one process).

Each thread has a group of its own: two threads on one group would race, and ranks would pair the wrong messages.
"""

import time
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor


class Peers:
    """All ranks of `group`, or this process alone where it is None."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self.group = group
        self.rank = 0 if group is None else group.rank()
        self.world_size = 1 if group is None else group.size()
        self.wait_s = 0.0
        """Seconds spent inside collectives."""
        self.bytes_sent = 0
        """To other ranks."""

    def all_gather(self, mine: Tensor) -> Tensor:
        """`(R, n)` from each rank's `(n,)`; all ranks must call."""
        if self.group is None:
            return mine[None]
        started = time.perf_counter()
        out = mine.new_empty(self.world_size * len(mine))
        dist.all_gather_into_tensor(out, mine, group=self.group)
        self.wait_s += time.perf_counter() - started
        return out.view(self.world_size, -1)

    def all_to_all(self, send: Tensor, send_counts: Sequence[int], recv_counts: Sequence[int]) -> Tensor:
        """Rows for each rank, in rank order, from rows `send` grouped by destination; all ranks must call."""
        if self.group is None:
            return send
        started = time.perf_counter()
        out = send.new_empty(sum(recv_counts), *send.shape[1:])
        dist.all_to_all_single(out, send.contiguous(), list(recv_counts), list(send_counts), group=self.group)
        self.wait_s += time.perf_counter() - started
        row_bytes = send.element_size() * (send[0].numel() if len(send) else 0)
        self.bytes_sent += row_bytes * (len(send) - send_counts[self.rank])
        return out


def world_group(group: dist.ProcessGroup | None) -> dist.ProcessGroup | None:
    """`group`, or the default one where there is one."""
    if group is None and dist.is_available() and dist.is_initialized():
        return dist.group.WORLD
    return group


def device_of(group: dist.ProcessGroup | None, device: torch.device) -> torch.device:
    """Where headers and counts live: NCCL takes CUDA tensors alone."""
    return device if group is not None and dist.get_backend(group) == "nccl" else torch.device("cpu")
