"""The collectives of one exchange thread, over any process group or over none (one process).

Each thread has a group of its own: two threads on one group would race, and ranks would pair the wrong messages.
"""

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fs_embed.errors import RanksDisagree

PHASES = ("ids", "open", "lookup", "update")
"""What a header can open; the number travels in it."""

_all_gather: Callable[..., Any] = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)  # torch 2.13 renamed


class Peers:
    """All ranks of `group`, or this process alone where it is None."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self.group = group
        self.rank = 0 if group is None else group.rank()
        self.world_size = 1 if group is None else group.size()
        self.bytes_sent: Counter[str] = Counter()
        """To other ranks, by phase."""
        self.wait_s: defaultdict[str, float] = defaultdict(float)
        """Seconds inside collectives, by phase."""
        self._num_headers = 0

    def agree(self, phase: str, *values: int) -> list[int]:
        """Each rank's first value; see `headers`."""
        return [header[0] for header in self.headers(phase, values)]

    def headers(self, phase: str, values: Sequence[int]) -> list[list[int]]:
        """Each rank's values, after a check that all ranks are at the same place; all ranks must call."""
        self._num_headers += 1
        # Of one size whatever the phase: gloo aborts the process where sizes differ, before anything could be told.
        padding = [0] * (3 + self.world_size - len(values))
        mine = [PHASES.index(phase), self._num_headers, *values, *padding]
        if self.group is None:
            return [list(values)]
        started = time.perf_counter()
        sent = torch.tensor(mine, device=device_of(self.group))
        out = sent.new_empty(self.world_size * len(mine))
        _all_gather(out, sent, group=self.group)
        theirs: list[list[int]] = out.view(self.world_size, -1).tolist()
        self.wait_s["headers"] += time.perf_counter() - started
        self.bytes_sent["headers"] += 8 * len(mine) * (self.world_size - 1)
        for rank, (their_phase, number, *_) in enumerate(theirs):
            if [their_phase, number] != mine[:2]:
                raise RanksDisagree(
                    f"every rank must look up and run backwards in the same order: this rank is at exchange "
                    f"{mine[1]} ({phase}), rank {rank} at {number} ({PHASES[their_phase]}); see that all ranks make "
                    "the same number of calls with the same mode"
                )
        return [header[2:] for header in theirs]

    def all_to_all(self, send: Tensor, send_counts: Sequence[int], recv_counts: Sequence[int], phase: str) -> Tensor:
        """Rows for each rank, in rank order, from rows `send` grouped by destination; all ranks must call."""
        if self.group is None:
            return send
        started = time.perf_counter()
        out = send.new_empty(sum(recv_counts), *send.shape[1:])
        dist.all_to_all_single(out, send.contiguous(), list(recv_counts), list(send_counts), group=self.group)
        self.wait_s[phase] += time.perf_counter() - started
        row_bytes = send.element_size() * (send[0].numel() if len(send) else 0)
        self.bytes_sent[phase] += row_bytes * (len(send) - send_counts[self.rank])
        return out


def world_group(group: dist.ProcessGroup | None) -> dist.ProcessGroup | None:
    """`group`, or the default one where there is one."""
    if group is None and dist.is_available() and dist.is_initialized():
        return dist.group.WORLD
    return group


def device_of(group: dist.ProcessGroup) -> torch.device:
    """Where headers live: NCCL takes CUDA tensors alone."""
    return torch.device("cuda" if dist.get_backend(group) == "nccl" else "cpu")
