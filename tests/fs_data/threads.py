"""Ranks as threads of one process: the exchange's protocol without sockets, fast enough for property tests."""

import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


class ThreadWorld:
    """One rank; all ranks of a test share `slots` and `barrier`."""

    def __init__(self, rank: int, size: int, slots: list[Any], barrier: threading.Barrier) -> None:
        self.rank, self.size, self.slots, self.barrier = rank, size, slots, barrier

    def gather(self, numbers: NDArray[np.int64], what: str) -> NDArray[np.int64]:
        return np.stack(self._trade(np.array(numbers, np.int64)))

    def shuffle(self, blocks: Tensor, send_bytes: Sequence[int], recv_bytes: Sequence[int]) -> Tensor:
        everyone = self._trade([b.clone() for b in blocks.split(list(send_bytes))])
        received = [everyone[peer][self.rank] for peer in range(self.size)]
        assert [len(r) for r in received] == list(recv_bytes), "ranks disagree on the size of a block"
        return torch.cat(received)

    def _trade(self, mine: Any) -> list[Any]:
        self.slots[self.rank] = mine
        self.barrier.wait(10)
        everyone = list(self.slots)
        self.barrier.wait(10)
        return everyone


def run_ranks(size: int, task: Callable[[ThreadWorld], Any]) -> list[Any]:
    """Each rank's `task(world)`, in rank order; the first error of a rank is raised."""
    slots: list[Any] = [None] * size
    barrier = threading.Barrier(size)
    results: list[Any] = [None] * size
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            results[rank] = task(ThreadWorld(rank, size, slots, barrier))
        except BaseException as e:
            errors.append(e)
            barrier.abort()

    threads = [threading.Thread(target=run, args=(r,)) for r in range(size)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    real = [e for e in errors if not isinstance(e, threading.BrokenBarrierError)]
    if real or errors:
        raise (real or errors)[0]
    return results
