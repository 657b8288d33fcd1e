"""What happens to all ranks when one fails: each raises in time, and names the rank and the cause."""

import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from torch.utils.data import DataLoader

from fs_data import BalancedDataLoader, BatchSchema, Derived, RankLost, RankStopped, RuntimeInfo, WorldBatch
from tests.fs_data.batches import Batch, Batches, Users, make_batch, rank_here, stay, users_of, zigzag
from tests.ranks import RankFailure, RankPool

Ranks = Callable[[int], RankPool]
TIMEOUT_S = 20.0


def balanced(loader: Any, **options: Any) -> BalancedDataLoader[Any]:
    return BalancedDataLoader(loader, **{"partitioner": zigzag, "timeout_s": TIMEOUT_S} | options)


def on_every_rank(world_size: int, text: str) -> str:
    """A pattern: `text` in every rank's error."""
    return "(?s)" + ".*".join(f"rank {r}: .*{text}" for r in range(world_size))


class Broken(Batches):
    """Raises in place of batch 3 on rank 1."""

    def __iter__(self) -> Iterator[Batch]:
        for i, batch in enumerate(super().__iter__()):
            if i == 3 and self.rank == 1:
                raise OSError("shard 7 is broken")
            yield batch


def _read_broken() -> None:
    with balanced(Broken([2] * 6)) as loader:
        users_of(loader)


@pytest.mark.parametrize("world_size", [2, 3])
def test_an_exception_in_the_dataset_of_one_rank_reaches_all(ranks: Ranks, world_size: int) -> None:
    text = "RankFailed: rank 1 failed at batch 3: OSError: shard 7 is broken"
    with pytest.raises(RankFailure, match=on_every_rank(world_size, text)):
        ranks(world_size).run(_read_broken)


def _plan_that_raises(world: WorldBatch, runtime: RuntimeInfo) -> Any:
    if rank_here() == 0 and runtime.step == 2:
        raise ZeroDivisionError("no rank left")
    return stay(world, runtime)


def _run_plan_that_raises() -> None:
    with balanced(Batches([2] * 6), partitioner=_plan_that_raises) as loader:
        users_of(loader)


def test_a_partition_function_that_raises_on_one_rank_reaches_all(ranks: Ranks) -> None:
    text = "RankFailed: rank 0 failed at batch 2: ZeroDivisionError: no rank left"
    with pytest.raises(RankFailure, match=on_every_rank(2, text)):
        ranks(2).run(_run_plan_that_raises)


def _derive(batch: Batch) -> int:
    if rank_here() == 1:
        raise KeyError("no such leaf")
    return len(batch["user"])


def _fail_after_the_exchange() -> None:
    batches = [b | {"size": 0} for b in Batches([3] * 6)]
    with balanced(batches, schema=BatchSchema({"size": Derived(_derive)})) as loader:
        list(loader)


def test_a_failure_after_the_samples_have_moved_reaches_all(ranks: Ranks) -> None:
    with pytest.raises(
        RankFailure, match=on_every_rank(2, "RankFailed: rank 1 failed at batch 0: KeyError: 'no such leaf'")
    ):
        ranks(2).run(_fail_after_the_exchange)


def _bad_weights() -> None:
    with balanced(Batches([3]), weights={"clicks": lambda batch: batch["user"] - 1}) as loader:
        list(loader)


def test_negative_weights_are_refused(ranks: Ranks) -> None:
    text = r"rank 0 failed at batch 0: LoaderError: weights\['clicks'\] must be finite and at least 0"
    with pytest.raises(RankFailure, match=on_every_rank(2, text)):
        ranks(2).run(_bad_weights)


class Unopened(Batches):
    """Fails before its first batch on rank 1."""

    def __iter__(self) -> Iterator[Batch]:
        if self.rank == 1:
            raise OSError("no shards")
        return super().__iter__()


def _read_unopened() -> None:
    with balanced(Unopened([2] * 2)) as loader:
        users_of(loader)


def test_a_loader_that_cannot_begin_on_one_rank_reaches_all(ranks: Ranks) -> None:
    with pytest.raises(RankFailure, match=on_every_rank(2, "RankFailed: rank 1 failed at batch 0: OSError: no shards")):
        ranks(2).run(_read_unopened)


class Slow(Batches):
    def __iter__(self) -> Iterator[Batch]:
        yield from super().__iter__()
        if self.rank == 1:
            time.sleep(60)


def _wait_for_slow() -> None:
    with balanced(Slow([2] * 3), timeout_s=1.0) as loader:
        users_of(loader)


def test_a_loader_that_gives_nothing_in_time_is_an_error_on_all(ranks: Ranks) -> None:
    text = r"RankFailed: rank 1 failed at batch 3: TimeoutError: the wrapped Slow gave no batch within 1.0 s"
    with pytest.raises(RankFailure, match=on_every_rank(2, text)):
        ranks(2).run(_wait_for_slow)


# ---- leaving the loop -----------------------------------------------------------------------------------------------


def _break_alone() -> tuple[int, str]:
    count = 0
    loader = balanced(Batches([2] * 6))
    try:
        for _ in loader:
            count += 1
            if count == 3 and rank_here() == 1:
                break
    except RankStopped as e:
        return count, f"{e.ranks}: {e}"
    finally:
        loader.close()
    return count, ""


def test_a_break_on_one_rank_raises_at_the_others_next_batch(ranks: Ranks) -> None:
    zero, one, two = ranks(3).run(_break_alone)
    assert one == (3, "")
    assert zero == two
    assert zero[0] == 3
    assert zero[1].startswith("(1,): rank 1 left the loop before batch 3 (break, or an exception in the loop)")


def _raise_alone() -> None:
    with balanced(Batches([2] * 6)) as loader:
        for i, _ in enumerate(loader):
            if i == 2 and rank_here() == 1:
                raise ArithmeticError("loss is NaN")


def test_an_exception_in_one_ranks_loop_raises_in_the_others(ranks: Ranks) -> None:
    with pytest.raises(
        RankFailure, match=r"(?s)rank 0: .*RankStopped: rank 1 left the loop before batch 3.*rank 1: .*loss is NaN"
    ):
        ranks(2).run(_raise_alone)


def _exit_alone() -> str:
    loader = balanced(Batches([2] * 50))
    try:
        for i, _ in enumerate(loader):
            if i == 2 and rank_here() == 1:
                sys.exit(3)
            time.sleep(0.01)
    except RankStopped as e:
        return str(e)
    return "went on"


def _leave_process() -> str:
    try:
        return _exit_alone()
    except SystemExit:
        from fs_data import pipeline

        pipeline._say_goodbye()  # what the interpreter does on its way out
        os._exit(3)


def test_a_process_that_exits_says_so(ranks: Ranks) -> None:
    zero, one = ranks(2).outcomes(_leave_process)
    assert one.exitcode == 3
    assert "rank 1 left the loop before batch 3" in zero.value


def _die_alone() -> tuple[tuple[int, ...], str, float]:
    loader = balanced(Batches([2] * 50))
    start = time.monotonic()
    try:
        for i, _ in enumerate(loader):
            if i == 2 and rank_here() == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(0.01)
    except RankLost as e:
        return e.ranks, str(e), time.monotonic() - start
    return (), "went on", 0.0


@pytest.mark.parametrize("world_size", [2, 3])
def test_a_killed_rank_is_named_on_all_others(ranks: Ranks, world_size: int) -> None:
    outcomes = ranks(world_size).outcomes(_die_alone)
    assert outcomes[1].exitcode == -signal.SIGKILL
    for survivor in (outcomes[0], *outcomes[2:]):
        assert survivor.ok, survivor.error
        lost, text, seconds = survivor.value
        assert lost == (1,), text
        assert "rank 1" in text
        assert seconds < TIMEOUT_S


# ---- worker processes -----------------------------------------------------------------------------------------------


class Suicidal(Users):
    """Its worker process kills itself at item 6 on rank 1."""

    def __getitem__(self, i: int) -> int:
        if i == 6 and self.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(i)


def _lose_a_worker() -> tuple[str, int]:
    inner = DataLoader(Suicidal(12), batch_size=2, collate_fn=make_batch, num_workers=1)
    loader = balanced(inner)
    try:
        with loader:
            users_of(loader)
    except RuntimeError as e:
        return f"{type(e).__name__}: {e}", _children_after_a_while()
    return "went on", -1


def _children_after_a_while() -> int:
    deadline = time.monotonic() + 10
    while multiprocessing.active_children() and time.monotonic() < deadline:
        time.sleep(0.05)
    return len(multiprocessing.active_children())


def test_a_killed_worker_is_an_error_on_all_and_leaves_no_orphans(ranks: Ranks) -> None:
    for text, children in ranks(2).run(_lose_a_worker):
        assert "rank 1" in text or "DataLoader worker" in text
        assert children == 0


def _leave_workers_behind() -> tuple[int, int]:
    inner = DataLoader(Users(40), batch_size=2, collate_fn=make_batch, num_workers=2)
    loader = balanced(inner)
    for _ in loader:
        break
    before = len(multiprocessing.active_children())
    loader.close()
    loader.close()
    return before, _children_after_a_while()


def test_close_ends_the_workers(ranks: Ranks) -> None:
    for before, after in ranks(2).run(_leave_workers_behind):
        assert before > 0
        assert after == 0
