"""What torch.distributed asks of a group and fs_comm does not do itself: an inner gloo group does it."""

# One method serves several of torch's spellings, whose parameters have other names in each version.
# pyright: reportAssignmentType=false, reportIncompatibleMethodOverride=false

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store


class WithInnerGroup(dist.ProcessGroup):
    """A process group whose operations are those of `_inner`, but for what subclasses do.

    Args:
        setup_s: How long ranks wait for each other while the inner group connects.
    """

    def __init__(self, store: Store, rank: int, size: int, *, timeout_s: float, setup_s: float) -> None:
        super().__init__(rank, size)  # pyright: ignore[reportCallIssue]  the form for subclasses, which stubs leave out
        self._inner: Any = dist.ProcessGroupGloo(store, rank, size, timedelta(seconds=setup_s))
        self._inner._set_default_timeout(timedelta(seconds=timeout_s))
        for device in ("cpu", "cuda"):  # for what torch asks of a group's backend in C++, past this class
            self._register_backend(torch.device(device), dist.ProcessGroup.BackendType.GLOO, self._inner)

    def allreduce(self, *args: Any, **kwargs: Any) -> dist.Work:
        return self._inner.allreduce(*args, **kwargs)

    def allreduce_coalesced(self, *args: Any, **kwargs: Any) -> dist.Work:
        return self._inner.allreduce_coalesced(*args, **kwargs)

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
