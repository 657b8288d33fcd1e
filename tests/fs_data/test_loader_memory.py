"""Nothing piles up: memory, descriptors and threads stay the same however long a run is."""

import gc
import os
import threading
import weakref
from collections.abc import Callable, Iterator

import pytest
import torch

from fs_data import BalancedDataLoader
from tests.fs_data.batches import Batch, make_batch, rank_here, zigzag
from tests.ranks import RankPool

Ranks = Callable[[int], RankPool]


class Endless:
    """Batches of 8 users, the same ones over and over, in new tensors."""

    def __init__(self, num_batches: int, alive: "weakref.WeakSet[torch.Tensor] | None" = None) -> None:
        self.num_batches, self.alive = num_batches, alive

    def __iter__(self) -> Iterator[Batch]:
        for i in range(self.num_batches):
            batch = make_batch([1000 * rank_here() + (8 * i + k) % 1000 for k in range(8)])
            if self.alive is not None:
                self.alive.add(batch["seq"].values)
            yield batch


def _resident_kib() -> int:
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmRSS"))


def _run(num_steps: int, check_every: int) -> list[tuple[int, int, int]]:
    seen: list[tuple[int, int, int]] = []
    with BalancedDataLoader(Endless(num_steps), partitioner=zigzag, timeout_s=60) as loader:
        for step, _ in enumerate(loader, start=1):
            if step % check_every == 0:
                gc.collect()
                seen.append((_resident_kib(), len(os.listdir("/proc/self/fd")), threading.active_count()))
    return seen


@pytest.mark.slow
def test_ten_thousand_steps_take_no_more_memory_than_the_first_thousand(ranks: Ranks) -> None:
    for seen in ranks(2).run(_run, 10_000, 1000, timeout_s=600):
        memory, descriptors, threads = zip(*seen, strict=True)
        assert len(memory) == 10
        assert max(memory[1:]) <= 1.02 * memory[1], memory
        assert len(set(descriptors[1:])) == 1, descriptors
        assert len(set(threads[1:-1])) == 1, threads  # at the end, the thread that draws has nothing left to do


def _alive_at_once() -> tuple[int, int]:
    """Raw batches alive at once while a loop runs, and after it."""
    alive: weakref.WeakSet[torch.Tensor] = weakref.WeakSet()
    most = 0
    with BalancedDataLoader(Endless(40, alive), partitioner=lambda w, _: w.rank, timeout_s=60) as loader:
        for _ in loader:  # nothing moves, so the balanced batches are the raw ones
            gc.collect()
            most = max(most, len(alive))
        del _
    gc.collect()
    return most, len(alive)


def test_at_most_three_balanced_batches_and_one_raw_batch_are_alive(ranks: Ranks) -> None:
    for most, after in ranks(2).run(_alive_at_once):
        assert 3 <= most <= 4
        assert after == 0


def _passes() -> tuple[int, int]:
    """Threads after the second and after the tenth pass."""
    with BalancedDataLoader(Endless(3), partitioner=zigzag, timeout_s=60) as loader:
        counts: list[int] = []
        for _ in range(10):
            for _ in loader:
                pass
            counts.append(threading.active_count())
    return counts[1], counts[-1]


def test_passes_leave_no_threads_behind(ranks: Ranks) -> None:
    for second, tenth in ranks(2).run(_passes):
        assert second == tenth


def _come_and_go(num_loaders: int) -> list[tuple[int, int]]:
    """Descriptors and threads after each loader is gone: closed, left by all ranks, or run to its end."""
    seen: list[tuple[int, int]] = []
    for i in range(num_loaders):
        loader = BalancedDataLoader(Endless(3), partitioner=zigzag, timeout_s=60)
        for _ in loader:
            if i % 3 == 1:
                break
        if i % 3 == 2:
            loader.close()
        del loader
        gc.collect()
        seen.append((len(os.listdir("/proc/self/fd")), threading.active_count()))
    return seen


def test_loaders_that_are_gone_leave_no_groups_behind(ranks: Ranks) -> None:
    for seen in ranks(2).run(_come_and_go, 12):
        assert seen[-1] == seen[2], seen
