"""What users of other loaders and balancers ran into, as inputs: each test names the report it is made from."""

import io
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Sampler
from torchdata.nodes import Batcher, IterableWrapper, Loader, Mapper, Prefetcher
from torchdata.stateful_dataloader import StatefulDataLoader

from fs_data import BalancedDataLoader
from tests.fs_data.batches import Batches, Users, check_batch, make_batch, rank_here, users_of, zigzag
from tests.ranks import RankPool

Ranks = Callable[[int], RankPool]


def balanced(loader: Any, **options: Any) -> BalancedDataLoader[Any]:
    return BalancedDataLoader(loader, **{"partitioner": zigzag, "timeout_s": 20.0} | options)


def saved(loader: BalancedDataLoader[Any]) -> bytes:
    data = io.BytesIO()
    torch.save(loader.state_dict(), data)
    return data.getvalue()


def restored(state: bytes) -> Any:
    return torch.load(io.BytesIO(state), weights_only=True)


# ---- resuming -------------------------------------------------------------------------------------------------------


class ByEpoch(Sampler[int]):
    """A sampler of the user's own: another rotation of its indices in each epoch."""

    def __init__(self, size: int) -> None:
        self.size, self.epoch = size, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        return iter([(i + 5 * self.epoch) % self.size for i in range(self.size)])

    def __len__(self) -> int:
        return self.size


def with_sampler(workers: int = 0, **options: Any) -> BalancedDataLoader[Any]:
    inner = StatefulDataLoader(
        Users(20), batch_size=2, sampler=ByEpoch(20), collate_fn=make_batch, num_workers=workers, **options
    )
    return balanced(inner)


def _stop_in_epoch_two(workers: int) -> None:
    """accelerate#2016, Lightning#21312: a stop in the middle of epoch 2, with a custom sampler."""
    with with_sampler(workers) as loader:
        users_of(loader)
        loader.set_epoch(1)
        whole: list[list[int]] = []
        for i, batch in enumerate(loader):
            whole.append(check_batch(batch))
            if i == 3:
                state = saved(loader)
    with with_sampler(workers) as loader:
        loader.set_epoch(1)
        loader.load_state_dict(restored(state))
        assert users_of(loader) == whole[4:]
    assert len(whole) == 10


@pytest.mark.parametrize("workers", [0, 2])
def test_a_stop_in_the_second_epoch_resumes_at_the_right_sample(ranks: Ranks, workers: int) -> None:
    ranks(2).run(_stop_in_epoch_two, workers)


def _prefetching_workers(persistent: bool) -> list[int]:
    """accelerate#3938: 40 rows on 2 ranks, workers that read ahead, and a stop after 3 batches."""

    def make() -> BalancedDataLoader[Any]:
        ahead: dict[str, Any] = {"num_workers": 2, "prefetch_factor": 4, "persistent_workers": persistent}
        inner = StatefulDataLoader(Users(20), batch_size=2, collate_fn=make_batch, **ahead)
        return balanced(inner)

    seen: list[int] = []
    with make() as loader:
        for i, batch in enumerate(loader):
            seen += check_batch(batch)
            if i == 2:
                state = saved(loader)
                break
    with make() as loader:
        loader.load_state_dict(restored(state))
        for users in users_of(loader):
            seen += users
    return seen


@pytest.mark.parametrize("persistent", [False, True])
def test_rows_that_workers_had_read_ahead_are_neither_lost_nor_repeated(ranks: Ranks, persistent: bool) -> None:
    first, second = ranks(2).run(_prefetching_workers, persistent)
    assert sorted(first + second) == [*range(20), *range(1000, 1020)]


def _epochs_with_persistent_workers() -> list[list[int]]:
    """datasets#6673: set_epoch with persistent workers."""
    with with_sampler(1, persistent_workers=True) as loader:
        passes: list[list[int]] = []
        for epoch in range(2):
            loader.set_epoch(epoch)
            passes.append([u for users in users_of(loader) for u in users])
    return passes


def test_a_new_epoch_has_another_order(ranks: Ranks) -> None:
    first, second = ranks(2).run(_epochs_with_persistent_workers)
    everyone = [a + b for a, b in zip(first, second, strict=True)]
    assert sorted(everyone[0]) == sorted(everyone[1]) == [*range(20), *range(1000, 1020)]
    assert everyone[0] != everyone[1]


def _nodes() -> None:
    """torchdata's nodes, which restart by themselves when they are asked after their end."""

    def make() -> BalancedDataLoader[Any]:
        first, size = 1000 * rank_here(), 12 if rank_here() else 8
        pairs = Batcher(IterableWrapper(range(first, first + size)), 2)
        return balanced(Loader(Prefetcher(Mapper(pairs, make_batch), prefetch_factor=2)))

    states, whole = [], []
    with make() as loader:
        for batch in loader:
            whole.append(check_batch(batch))
            states.append(saved(loader))
    assert len(whole) == 6
    for done, state in enumerate(states, start=1):
        with make() as loader:
            loader.load_state_dict(restored(state))
            assert users_of(loader) == whole[done:], f"after {done} batches"
        dist.barrier()


def test_torchdata_nodes_resume_after_every_batch(ranks: Ranks) -> None:
    ranks(2).run(_nodes)


# ---- ends and sizes -------------------------------------------------------------------------------------------------


def _users(sizes: list[list[int]], options: dict[str, Any]) -> list[list[int]]:
    with balanced(Batches(sizes[rank_here()]), **options) as loader:
        return users_of(loader)


def test_loaders_of_four_and_seven_batches_stop_at_one_step(ranks: Ranks) -> None:
    """torchrec PR 4158."""
    found = ranks(2).run(_users, [[2] * 4, [2] * 7], {"on_exhausted": "stop"})
    assert [len(f) for f in found] == [4, 4]


def test_an_exhausted_rank_gets_real_work(ranks: Ranks) -> None:
    """torchrec issue 3132: from step 2 on, one rank has nothing of its own."""
    first, second = ranks(2).run(_users, [[4, 4], [4, 4, 4, 4]], {})
    assert [len(b) for b in first[2:]] == [2, 2]
    assert all(u >= 1000 for users in first[2:] for u in users)
    assert not set(first[2]) & set(second[2])


def test_207_samples_on_four_ranks_differ_by_one(ranks: Ranks) -> None:
    """verl#4152, miles#969: counts that the number of ranks does not divide."""
    for total in ([52, 52, 52, 51], [50, 52, 52, 52]):
        found = ranks(4).run(_users, [[n] for n in total], {})
        counts = [len(f[0]) for f in found]
        assert sum(counts) == sum(total)
        assert max(counts) - min(counts) <= 1


# ---- processes ------------------------------------------------------------------------------------------------------

_PARENT = """
    import faulthandler, signal
    faulthandler.register(signal.SIGUSR1)  # all threads' stacks, should it not end
    import torch
    from torch.utils.data import DataLoader
    from fs_data import BalancedDataLoader
    from tests.fs_data.batches import Users, make_batch

    if __name__ == "__main__":
        inner = DataLoader(Users(400, rank=0), batch_size=2, collate_fn=make_batch, num_workers=2)
        with BalancedDataLoader(inner, partitioner=lambda world, runtime: world.rank) as loader:
            for i, batch in enumerate(loader):
                if i == 1:
                    import multiprocessing, time
                    print(*[p.pid for p in multiprocessing.active_children()], flush=True)
                    for _ in range(1000):  # one long wait would miss a signal that came right before it
                        time.sleep(0.05)
"""


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGKILL])
def test_no_worker_outlives_its_parent(tmp_path: Path, sent: signal.Signals) -> None:
    """EgoVerse PR#682."""
    script = tmp_path / "parent.py"
    script.write_text(textwrap.dedent(_PARENT))
    root = Path(__file__).parents[2]
    with subprocess.Popen(
        [sys.executable, str(script)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env=os.environ | {"PYTHONPATH": str(root)},
    ) as parent:  # fmt: skip
        assert parent.stdout is not None
        workers = [int(pid) for pid in parent.stdout.readline().split()]
        assert len(workers) == 2
        parent.send_signal(sent)
        try:
            parent.wait(40)
        except subprocess.TimeoutExpired:
            parent.send_signal(signal.SIGUSR1)
            time.sleep(1)
            parent.kill()
            pytest.fail(f"the parent did not end:\n{parent.communicate()[1]}")
        deadline = time.monotonic() + 20
        while any(map(_lives, workers)) and time.monotonic() < deadline:
            time.sleep(0.1)
        assert not any(map(_lives, workers))


_ENDS_EARLY = """
    import atexit, threading, time
    atexit.register(lambda: print([t.name for t in threading.enumerate()]))  # after what is registered from now on
    import torch
    from fs_data import BalancedDataLoader

    drawing = threading.Event()

    class Batches:
        def __iter__(self):
            yield torch.ones(4, 2)
            drawing.set()
            time.sleep(0.5)
            yield torch.ones(4, 2)

    def no_plan(world, runtime):
        drawing.wait(10)
        raise ValueError("no plan")

    for _ in BalancedDataLoader(Batches(), partitioner=no_plan):
        pass
"""


def test_no_thread_outlives_the_interpreter() -> None:
    """One that comes back from C++ to an interpreter that has ended aborts the process: torch's `terminate called`."""
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    command = [sys.executable, "-c", textwrap.dedent(_ENDS_EARLY)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert "ValueError: no plan" in done.stderr
    assert (done.returncode, done.stdout) == (1, "['MainThread']\n")


def _lives(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def _many_objects() -> int:
    """pytorch#20433: a list of very many objects, read by workers; the loader keeps none of its batches."""
    inner = DataLoader(Users(3000), batch_size=50, collate_fn=make_batch, num_workers=2)
    with balanced(inner) as loader:
        return sum(len(check_batch(batch)) for batch in loader)


def test_many_small_objects_pass_through(ranks: Ranks) -> None:
    assert sum(ranks(2).run(_many_objects)) == 6000
