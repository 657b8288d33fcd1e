"""Batches that live on the GPU, balanced across ranks that share it."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from fs_data import BalancedDataLoader
from fs_data.device import map_parts
from tests.fs_data.batches import Batch, Batches, check_batch, rank_here, zigzag
from tests.ranks import RankPool

pytestmark = pytest.mark.gpu

SIZES = [[5, 70, 0, 6], [7, 1, 9, 6]]


class BatchesOnGpu(Batches):
    def __iter__(self) -> Iterator[Batch]:
        for batch in super().__iter__():
            yield map_parts(batch, lambda part: part.to("cuda"))


def _users(on_gpu: bool) -> list[list[int]]:
    make: Any = BatchesOnGpu if on_gpu else Batches
    found: list[list[int]] = []
    with BalancedDataLoader(make(SIZES[rank_here()]), partitioner=zigzag, timeout_s=60.0) as loader:
        for batch in loader:
            assert batch["user"].is_cuda == on_gpu
            assert batch["seq"].values.is_cuda == on_gpu
            found.append(check_batch(batch))
    return found


def test_batches_on_the_gpu_are_balanced_as_on_the_host(ranks: Callable[[int], RankPool]) -> None:
    host = ranks(2).run(_users, False)
    assert ranks(2).run(_users, True) == host
    assert host[0] != [list(range(a, a + n)) for a, n in ((0, 5), (5, 70), (75, 0), (75, 6))], "nothing moved"
