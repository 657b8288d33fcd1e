"""The test harness itself: it must report failures, deaths and hangs, or every other test is worth nothing."""

import os
import signal
import time
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

from tests.ranks import RankFailure, RankPool


def _sum_of_ranks() -> int:
    x = torch.tensor(dist.get_rank())
    dist.all_reduce(x)
    return int(x)


def _fail_on_rank_one() -> None:
    if dist.get_rank() == 1:
        raise ValueError("broken on purpose")


def _die_on_rank_one() -> None:
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)


def _sleep() -> None:
    time.sleep(60)


def test_ranks_share_a_process_group(ranks: Callable[[int], RankPool]) -> None:
    assert ranks(2).run(_sum_of_ranks) == [1, 1]


def test_an_exception_names_its_rank(ranks: Callable[[int], RankPool]) -> None:
    with pytest.raises(RankFailure, match=r"(?s)rank 1: .*broken on purpose"):
        ranks(2).run(_fail_on_rank_one)


def test_a_killed_rank_is_an_outcome(ranks: Callable[[int], RankPool]) -> None:
    outcomes = ranks(2).outcomes(_die_on_rank_one)
    assert [o.exitcode for o in outcomes] == [None, -signal.SIGKILL]


def test_a_hang_prints_all_stacks(ranks: Callable[[int], RankPool]) -> None:
    with pytest.raises(RankFailure, match=r"(?s)rank 0.*in _sleep.*rank 1.*in _sleep"):
        ranks(2).run(_sleep, timeout_s=1.0)


def test_a_pool_works_again_after_a_failure(ranks: Callable[[int], RankPool]) -> None:
    assert ranks(2).run(_sum_of_ranks) == [1, 1]
