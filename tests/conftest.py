"""What all tests share: pools of ranks, and skips that say what is missing."""

import os
from collections.abc import Callable, Iterator

import pytest
import torch
from hypothesis import settings

from tests.ranks import RankPool

torch.set_num_threads(1)
if not torch.cuda.is_available():  # Triton reads it once, when it is first imported, by whichever test that is
    os.environ.setdefault("TRITON_INTERPRET", "1")
# No deadline: how long one example takes says more about the machine than about the code.
# In CI the same examples each time: a change is judged by what it changes.
settings.register_profile("freescale", deadline=None, derandomize="CI" in os.environ)
settings.load_profile("freescale")


@pytest.fixture(scope="session")
def ranks() -> Iterator[Callable[[int], RankPool]]:
    """`ranks(n)` is a pool of n live processes in one gloo group, kept for the whole session (see tests/ranks.py)."""
    pools: dict[int, RankPool] = {}

    def pool(world_size: int) -> RankPool:
        return pools.setdefault(world_size, RankPool(world_size))

    yield pool
    for p in pools.values():
        p.close()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    has_cuda = torch.cuda.is_available()
    has_rdma = os.path.isdir("/sys/class/infiniband") and bool(os.listdir("/sys/class/infiniband"))
    for item in items:
        if item.get_closest_marker("gpu") and not has_cuda:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device: torch.cuda.is_available() is False"))
        if item.get_closest_marker("rdma") and not has_rdma:
            item.add_marker(
                pytest.mark.skip(
                    reason="needs an RDMA device in /sys/class/infiniband; `make test-rdma` with RDMA_GUEST set to a "
                    "command that runs its arguments where there is one"
                )
            )
