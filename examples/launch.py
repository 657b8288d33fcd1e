"""Process group and device of a rank, and errors in one line."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist

import fs_comm


@contextmanager
def process_group(timeout_s: float) -> Iterator[torch.device]:
    """The default process group, from torchrun's environment or for one rank, and this rank's device."""
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    gpus = torch.cuda.device_count()
    device = torch.device("cuda", local_rank % gpus) if gpus else torch.device("cpu")
    # NCCL refuses two ranks on one GPU; gloo does not mind.
    backend = "cpu:gloo,cuda:nccl" if gpus >= int(os.environ.get("LOCAL_WORLD_SIZE", "1")) else "gloo"
    if gpus:
        torch.cuda.set_device(device)
    for name, value in (("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", "29500"), ("RANK", "0"), ("WORLD_SIZE", "1")):
        os.environ.setdefault(name, value)
    dist.init_process_group(backend, timeout=timedelta(seconds=timeout_s))
    try:
        yield device
    finally:
        dist.destroy_process_group()


def explain(error: Exception) -> str:
    """One line: the ranks that were lost where that is what lies behind the error, else the error."""
    if isinstance(error, RuntimeError) and (lost := fs_comm.lost_ranks(timeout_s=5.0)):
        names = ", ".join(f"rank {rank} ({reason})" for rank, reason in lost.items())
        return f"lost {names}; restart all ranks with --resume to go on from the newest checkpoint"
    return " ".join(str(error).split())
