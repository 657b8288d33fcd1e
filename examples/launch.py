"""Process group and device of a rank, and errors in one line."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist

import fs_comm
from fs_data.errors import RankLost, RankStopped
from fs_embed.errors import ExchangeTimeout


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
    if _may_be_a_lost_rank(error) and (lost := fs_comm.lost_ranks(timeout_s=5.0)):
        names = ", ".join(f"rank {rank} ({reason})" for rank, reason in lost.items())
        return f"lost {names}; restart all ranks with --resume to go on from the newest checkpoint"
    return " ".join(str(error).split())


def _may_be_a_lost_rank(error: Exception) -> bool:
    """Whether communication failed. What else fails here must be told as it is, though others are gone by then."""
    if isinstance(error, (dist.DistError, RankLost, RankStopped, ExchangeTimeout)):
        return True
    return type(error) is RuntimeError and any(word in str(error) for word in ("gloo", "NCCL", "onnection", "ocket"))


@contextmanager
def told_in_one_line() -> Iterator[None]:
    """Says what went wrong in one line that names this rank, and ends the process with status 1."""
    try:
        yield
    except (ValueError, OSError, RuntimeError) as error:
        rank = os.environ.get("RANK", "0")
        print(f"train.py: rank {rank}: {explain(error)}", file=sys.stderr, flush=True)
        raise SystemExit(1) from None
