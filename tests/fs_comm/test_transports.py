"""The shared suite over every road that this machine has (verbs: tests/rdma)."""

import os
import time
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

import fs_comm
from tests.fs_comm import transport_suite
from tests.ranks import RankPool

Ranks = Callable[[int], RankPool]
ROADS = ["attach", "staged", "gloo", "attach+gloo"]


def group_over(road: str, timeout_s: float = 30.0) -> fs_comm.SmFreeGroup:
    """Of all ranks; for `attach+gloo`, the first half of them says that it is on another host than the second."""
    half = (dist.get_world_size() + 1) // 2
    is_second = dist.get_rank() >= half
    is_alone = dist.get_world_size() - half == 1 if is_second else half == 1
    if road == "attach+gloo":
        os.environ["FS_COMM_HOST"] = "second" if is_second else "first"
    os.environ["FS_COMM_ATTACH"] = str(int(road != "staged"))
    try:
        group = fs_comm.new_group(transports=("gloo",) if road == "gloo" else ("shm", "gloo"), timeout_s=timeout_s)
    finally:
        os.environ.pop("FS_COMM_HOST", None)
        del os.environ["FS_COMM_ATTACH"]
    assert isinstance(group, fs_comm.SmFreeGroup)
    expected = "gloo" if road == "attach+gloo" and is_alone else road
    assert group.road == expected, group.transport_reason
    return group


def _pass_the_suite(road: str) -> None:
    group = group_over(road)
    for case in transport_suite.CASES:
        try:
            case(group)
        except BaseException as error:
            error.add_note(f"in {case.__name__}, over {road}")
            raise
    dist.destroy_process_group(group)


@pytest.mark.parametrize("road", ROADS)
@pytest.mark.parametrize("size", [2, 4])
def test_a_group_gives_gloos_bits_over(ranks: Ranks, size: int, road: str) -> None:
    ranks(size).run(_pass_the_suite, road, timeout_s=120.0)


def _more_than_2_gib(road: str) -> None:
    """One part alone is larger than what 31 bits, or one call of the kernel's, can count."""
    group, rank = group_over(road, timeout_s=280.0), dist.get_rank()
    num_bytes = (2 << 30) + 12_345
    rows = [[1, num_bytes], [5, 0]]
    mine = torch.zeros(sum(rows[rank]), dtype=torch.uint8)
    if rank == 0:
        mine[-1] = mine[2**31] = 7
    out = torch.empty(rows[0][rank] + rows[1][rank], dtype=torch.uint8)
    dist.all_to_all_single(out, mine, [rows[0][rank], rows[1][rank]], rows[rank], group=group)
    if rank == 1:
        assert out.count_nonzero() == 2
        assert out[-1] == 7
        assert out[2**31 - 1] == 7
    dist.destroy_process_group(group)


@pytest.mark.slow
@pytest.mark.parametrize("road", ["attach", "staged", "gloo"])
def test_more_than_2_gib_go_in_one_call(ranks: Ranks, road: str) -> None:
    ranks(2).run(_more_than_2_gib, road, timeout_s=300.0)


def _late_after_its_header() -> str:
    group = group_over("gloo", timeout_s=1.0)
    if dist.get_rank() == 1:
        check = group._engine._check  # pyright: ignore[reportPrivateUsage]
        group._engine._check = lambda *args: (time.sleep(3), check(*args))[1]  # pyright: ignore  as if stopped there
    try:
        dist.all_gather([torch.empty(100_000)] * 2, torch.zeros(100_000), group=group)
    except fs_comm.CommTimeout as error:
        return str(error)
    return "no error"


def test_a_rank_whose_peer_gave_up_meanwhile_is_told_why(ranks: Ranks) -> None:
    first, second = ranks(2).run(_late_after_its_header)
    assert "waited 1 s for rank 1" in first
    assert "rank 0 gave the group up: all_gather of float32 (number 1): waited 1 s for rank 1" in second
