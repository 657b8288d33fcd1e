"""Ranks that die, stop, leave or disagree at random points: an error in time on every other, and never wrong data.

A round is drawn from its seed: a road, the operations, and who does what wrong at which of them. Every rank checks all
data of every operation that ended without an error.
"""

import gc
import os
import random
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.fs_comm.test_transports import ROADS, group_over
from tests.ranks import RankPool

Ranks = Callable[[int], RankPool]
SIZE = 3
NUM_OPERATIONS = 6
TIMEOUT_S = 4.0
SLACK_S = 4.0
"""For a machine that does other things too."""
DISAGREEMENTS = ("operation", "size", "dtype", "order")
FAULTS = ("kill", "stop", "abort", "leave", "absent", *DISAGREEMENTS)


@dataclass(frozen=True)
class Round:
    seed: int
    road: str
    fault: str
    victim: int
    at: int
    """Number of the operation at which it happens."""
    delay_s: float
    """From the beginning of that operation, for those that come from outside."""
    operations: tuple[tuple[str, int], ...]
    """(spelling, elements for each rank)"""


def draw(seed: int) -> Round:
    rng = random.Random(seed)
    spellings = [rng.choice(["all_gather", "all_to_all"])]
    while len(spellings) < NUM_OPERATIONS:  # neighbours differ: else their order could not be wrong
        spellings.append("all_to_all" if spellings[-1] == "all_gather" else "all_gather")
    return Round(
        seed=seed,
        road=rng.choice(ROADS),
        fault=FAULTS[seed % len(FAULTS)],
        victim=rng.randrange(SIZE),
        at=rng.randrange(NUM_OPERATIONS - 1),
        delay_s=rng.choice([0.0, 0.001, 0.01, 0.03]),
        operations=tuple((s, rng.choice([1, 1_000, 30_000, 1_000_000])) for s in spellings),
    )


@dataclass(frozen=True)
class Report:
    """What one rank saw."""

    failed_at: int | None
    kind: str
    text: str
    seconds: float
    """That the failed operation took."""
    left: dict[str, int]
    """More of each than before the round."""


def value(seed: int, number: int, source: int, target: int) -> float:
    return float((seed * 31 + number * 7 + source * 3 + target) % 1000)


def operate(group: Any, plan: Round, number: int, *, dtype: torch.dtype = torch.float32, more: int = 0) -> None:
    """Does the operation of that number, and checks what it brought."""
    spelling, length = plan.operations[number]
    rank, length = dist.get_rank(), length + more
    outs = [torch.full((length,), -1, dtype=dtype) for _ in range(SIZE)]
    if spelling == "all_gather":
        ins = [torch.full((length,), value(plan.seed, number, rank, 0), dtype=dtype)]
        work = dist.all_gather(outs, ins[0], group=group, async_op=number % 2 == 0)
    else:
        ins = [torch.full((length,), value(plan.seed, number, rank, p), dtype=dtype) for p in range(SIZE)]
        work = dist.all_to_all(outs, ins, group=group, async_op=number % 2 == 0)
    if work is not None:
        work.wait()
    for source, out in enumerate(outs):
        target = 0 if spelling == "all_gather" else rank
        assert (out == value(plan.seed, number, source, target)).all(), f"wrong data of rank {source}, without an error"
    for t in ins:  # the caller's again: whoever still reads it must get an error
        t.fill_(-2)


def do_wrong(group: Any, plan: Round, number: int) -> bool:
    """The victim's part; False: it goes on as the others do."""
    pid = os.getpid()
    if plan.fault == "kill":
        threading.Timer(plan.delay_s, os.kill, (pid, signal.SIGKILL)).start()
        return False
    if plan.fault == "stop":
        script = f"sleep {plan.delay_s}; kill -STOP {pid}; sleep {TIMEOUT_S + 2}; kill -CONT {pid}"
        subprocess.Popen(("sh", "-c", script))
        return False
    if plan.fault == "operation":
        other = "all_gather" if plan.operations[number][0] == "all_to_all" else "all_to_all"
        operations = list(plan.operations)
        operations[number] = (other, operations[number][1])
        operate(group, Round(**{**vars(plan), "operations": tuple(operations)}), number)
    elif plan.fault == "size":
        operate(group, plan, number, more=1)
    elif plan.fault == "dtype":
        operate(group, plan, number, dtype=torch.int32)
    elif plan.fault == "order":
        operate(group, plan, number + 1)
    elif plan.fault == "abort":
        group.abort()
    elif plan.fault == "absent":
        time.sleep(TIMEOUT_S + 1)
    return True


def take_part(plan: Round) -> tuple[int | None, str, str, float]:
    group, number, started = group_over(plan.road, TIMEOUT_S), 0, time.monotonic()
    try:
        for number in range(NUM_OPERATIONS):
            started = time.monotonic()
            if plan.victim == dist.get_rank() and plan.at == number and do_wrong(group, plan, number):
                if plan.fault not in ("abort", "absent"):
                    break
            operate(group, plan, number)
    except dist.DistBackendError as error:
        return number, type(error).__name__, str(error), time.monotonic() - started
    finally:
        dist.destroy_process_group(group)
    return None, "", "", 0.0


def things() -> dict[str, int]:
    gc.collect()
    return {
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
        "shared memory": sum("fs_comm" in line for line in open("/proc/self/maps")),
    }


def play(plan: Round) -> Report:
    if not getattr(play, "is_warm", False):
        dist.destroy_process_group(group_over("attach+gloo"))
        play.is_warm = True  # pyright: ignore[reportFunctionMemberAccess]
    before = things()
    found = take_part(plan)
    deadline = time.monotonic() + 5
    while (left := {k: n - before[k] for k, n in things().items()}) and any(n > 0 for n in left.values()):
        if time.monotonic() > deadline:  # gloo's threads end a little later than its groups
            break
        time.sleep(0.05)
    return Report(*found, left)


def check(pool: RankPool, plan: Round) -> None:
    outcomes = pool.outcomes(play, plan, timeout_s=60.0)
    for rank, outcome in enumerate(outcomes):
        if rank == plan.victim and plan.fault == "kill":
            continue
        assert outcome.ok, f"{plan}, rank {rank}: {outcome.error or outcome.exitcode}"
        report: Report = outcome.value
        where = f"{plan}, rank {rank}: {report}"
        if report.failed_at is not None:
            assert report.kind in ("PeerLost", "CommTimeout", "Mismatch", "CommError", "GroupClosed"), where
            assert report.failed_at >= plan.at - 1, where  # it may be one operation behind the victim
            if not (rank == plan.victim and plan.fault in ("stop", "absent")):
                assert report.seconds <= TIMEOUT_S + SLACK_S, where
        elif plan.fault not in ("kill", "stop"):  # which may come when all is over
            assert (rank, plan.fault) == (plan.victim, "leave"), where
        assert all(n <= 0 for n in report.left.values()), where
    if plan.fault in DISAGREEMENTS:
        assert [o.value.kind for o in outcomes] == ["Mismatch"] * SIZE, [o.value for o in outcomes]


def test_faults_end_in_errors_and_leave_nothing(ranks: Ranks) -> None:
    for seed in range(len(FAULTS)):
        check(ranks(SIZE), draw(seed))


@pytest.mark.slow
@pytest.mark.parametrize("tens", range(20))
def test_200_rounds_of_faults_end_in_errors_and_leave_nothing(ranks: Ranks, tens: int) -> None:
    for seed in range(100 + 10 * tens, 110 + 10 * tens):
        check(ranks(SIZE), draw(seed))
