"""Loaders used in unusual ways: what is meant happens, or an error says on every rank what must hold."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torchdata.stateful_dataloader import StatefulDataLoader

import fs_data.loader
from fs_data import BalancedDataLoader, BatchSchema, Derived, LoaderError, RuntimeInfo, WorldBatch
from fs_data.partition import Capped
from tests.fs_data.batches import Batch, Batches, Users, check_batch, make_batch, rank_here, users_of, zigzag
from tests.fs_data.test_loader_faults import balanced, on_every_rank
from tests.ranks import RankFailure, RankPool

Ranks = Callable[[int], RankPool]


# ---- passes ---------------------------------------------------------------------------------------------------------


def _nest_loops() -> tuple[int, str]:
    with balanced(Batches([2] * 4)) as loader:
        inner = 0
        try:
            for _ in loader:
                inner += len(users_of(loader))
        except LoaderError as e:
            return inner, str(e)
    return inner, ""


def test_a_loop_whose_pass_was_ended_by_another_does_not_end_as_if_complete(ranks: Ranks) -> None:
    text = "this pass over the data was ended: a new pass over the data began; leave its loop"
    assert ranks(2).run(_nest_loops) == [(4, text)] * 2


def _load_within_the_loop() -> tuple[str, list[int]]:
    with balanced(Batches([2] * 4)) as loader:
        try:
            for _ in loader:
                state = loader.state_dict()
                loader.load_state_dict(state)
        except LoaderError as e:
            return str(e), [len(users) for users in users_of(loader)]
    return "", []


def test_a_state_loaded_within_the_loop_takes_a_new_loop(ranks: Ranks) -> None:
    text = "this pass over the data was ended: a state was loaded; leave its loop"
    assert ranks(2).run(_load_within_the_loop) == [(text, [2] * 3)] * 2


def _close_within_the_loop() -> tuple[int, int]:
    loader, count = balanced(Batches([2] * 4)), 0
    for _ in loader:
        count += 1
        loader.close()
    return count, len(users_of(loader))


def test_closing_ends_the_loop_and_a_new_one_may_begin(ranks: Ranks) -> None:
    assert ranks(2).run(_close_within_the_loop) == [(1, 4)] * 2


def _journal_after_close(path: str) -> int:
    loader = balanced(Batches([2] * 3), journal=path)
    for _ in range(2):
        users_of(loader)
        loader.close()
    return len(Path(path).read_text().splitlines())


def test_a_pass_after_close_goes_on_with_the_journal(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks(2).run(_journal_after_close, str(tmp_path / "journal")) == [1 + 6] * 2


def _same_batch_in_each_pass() -> list[list[list[int]]]:
    with balanced(list(Batches([3]))) as loader:
        return [users_of(loader) for _ in range(2)]


def test_one_batch_may_be_a_whole_pass(ranks: Ranks) -> None:
    for first, second in ranks(2).run(_same_batch_in_each_pass):
        assert first == second


def _len_and_steps(on_exhausted: Any) -> tuple[int, int]:
    with balanced(Batches([2] * (3 + rank_here())), on_exhausted=on_exhausted) as loader:
        return len(loader), len(users_of(loader))


@pytest.mark.parametrize(("on_exhausted", "steps"), [("balance", 4), ("stop", 3)])
def test_len_is_the_number_of_steps(ranks: Ranks, on_exhausted: str, steps: int) -> None:
    assert ranks(2).run(_len_and_steps, on_exhausted) == [(steps, steps)] * 2


class Unmeasured(Batches):
    def __len__(self) -> int:
        raise NotImplementedError


def test_a_loader_that_refuses_its_length_has_none() -> None:
    with balanced(Unmeasured([2])) as loader:
        assert users_of(loader) == [[0, 1]]
        with pytest.raises(TypeError, match="the wrapped Unmeasured has no length"):
            len(loader)


# ---- state ----------------------------------------------------------------------------------------------------------


def _change_to_a_stateful_loader() -> list[list[int]]:
    with balanced(Batches([2] * 5), partitioner="identity") as loader:
        for i, _ in enumerate(loader):
            if i == 2:
                break
        state = loader.state_dict()
    inner = StatefulDataLoader(Users(10), batch_size=2, collate_fn=make_batch)
    with balanced(inner, partitioner="identity") as loader:
        loader.load_state_dict(state)
        return users_of(loader)


def test_a_state_without_the_wrapped_loaders_draws_and_drops(ranks: Ranks) -> None:
    assert ranks(2).run(_change_to_a_stateful_loader)[0] == [[6, 7], [8, 9]]


def test_a_state_that_cannot_be_read_says_so() -> None:
    with balanced(Batches([2])) as loader, pytest.raises(ValueError, match="'dp_rank_0' must be as state_dict"):
        loader.load_state_dict(loader.state_dict() | {"dp_rank_0": b"cut"})


# ---- leaving --------------------------------------------------------------------------------------------------------


def _fail_while_the_other_waits(close_in: str) -> tuple[str, float]:
    fs_data.loader.PATIENCE_S, before = 0.3, fs_data.loader.PATIENCE_S
    start = time.monotonic()
    loader = balanced(Batches([2] * 6))
    try:
        if close_in == "with":
            with loader:
                _train(loader)
        else:
            try:
                _train(loader)
            finally:
                loader.close()
    except Exception as e:
        return str(e), time.monotonic() - start
    finally:
        fs_data.loader.PATIENCE_S = before
    return "", 0.0


def _train(loader: Any) -> None:
    for i, _ in enumerate(loader):
        if i == 2 and rank_here() == 1:
            raise ArithmeticError("out of memory")
        if i == 2:
            time.sleep(3)  # as in a collective that waits for rank 1, and would for its whole timeout


@pytest.mark.parametrize("close_in", ["with", "finally"])
def test_an_error_in_the_loop_is_not_held_back_while_others_wait_for_this_rank(ranks: Ranks, close_in: str) -> None:
    (zero, _), (one, seconds) = ranks(2).run(_fail_while_the_other_waits, close_in)
    assert "rank 1 left the loop before batch 3" in zero
    assert one == "out of memory"
    assert seconds < 2.5


# ---- construction ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Mine:
    function: Any

    def __call__(self, world: WorldBatch, runtime: RuntimeInfo) -> Any:
        return self.function(world, runtime)


def _partitioners_that_hold_functions() -> int:
    count = 0
    for partitioner in (Mine(zigzag), Capped(Mine(zigzag), max_samples=9)):
        with balanced(Batches([2] * 2), partitioner=partitioner) as loader:
            count += len(users_of(loader))
    return count


def test_partitioners_that_hold_functions_are_alike_on_all_ranks(ranks: Ranks) -> None:
    assert ranks(2).run(_partitioners_that_hold_functions) == [4] * 2


def _differ(option: str) -> None:
    first = rank_here() == 0
    options: dict[str, Any] = {
        "audit": {"audit": first},
        "group": {"schema": BatchSchema(group="user" if first else None)},
        "journal": {"journal": "/nonexistent/journal"},
        "replay": {"replay": "/nonexistent/journal" if first else None},
    }[option]
    with balanced(Batches([2] * 2), **options) as loader:
        users_of(loader)


@pytest.mark.parametrize(
    ("option", "text"),
    [
        ("audit", "Disagreement: all ranks must agree: rank 1 has 'audit=False' in place of 'audit=True' of rank 0"),
        ("group", r"Disagreement: all ranks must agree: rank 1 has 'group=None' in place of 'group=Group\(key=user\)'"),
        ("journal", "RankFailed: rank 0 failed at construction: FileNotFoundError: .*nonexistent"),
        ("replay", "RankFailed: rank 0 failed at construction: FileNotFoundError: .*nonexistent"),
    ],
)
def test_what_one_rank_does_otherwise_is_named_on_all(ranks: Ranks, option: str, text: str) -> None:
    with pytest.raises(RankFailure, match=on_every_rank(2, text)):
        ranks(2).run(_differ, option)


def _attach_on_one_rank() -> None:
    model = torch.nn.Linear(3, 1)
    with balanced(Batches([2] * 2)) as loader:
        if rank_here() == 0:
            loader.attach(model, torch.optim.SGD(model.parameters(), lr=0.1))
        users_of(loader)


def test_attach_on_one_rank_is_an_error_on_all(ranks: Ranks) -> None:
    text = r"Disagreement: attach\(model, optimizer\) must be called on all ranks, or on none; .* ranks \[1\] had not"
    with pytest.raises(RankFailure, match=on_every_rank(2, text)):
        ranks(2).run(_attach_on_one_rank)


def _work_in_anothers_group() -> str:
    group: Any = dist.new_group([0])
    try:
        with BalancedDataLoader(Batches([2]), group=group) as loader:
            return str(users_of(loader))
    except ValueError as e:
        return str(e)


def test_a_group_without_this_rank_is_refused(ranks: Ranks) -> None:
    zero, one = ranks(2).run(_work_in_anothers_group)
    assert zero == "[[0, 1]]"
    assert "group must have this rank in it" in one


def _make_under_a_default_device() -> int:
    with torch.device("meta"):
        loader = balanced(Batches([2] * 2))
    with loader:
        return len(users_of(loader))


def test_a_default_device_is_not_the_loaders(ranks: Ranks) -> None:
    assert ranks(2).run(_make_under_a_default_device) == [2] * 2


class Wide:
    """Batches of many leaves, the last of which has another name on rank 1."""

    def __iter__(self) -> Any:
        last = "last of all" if rank_here() else "feature 299"
        yield {name: torch.zeros(2) for name in [*(f"feature {i}" for i in range(299)), last]}


def _read_wide() -> None:
    with balanced(Wide()) as loader:
        list(loader)


def test_leaves_that_differ_late_in_a_wide_batch_are_shown(ranks: Ranks) -> None:
    text = "rank 1 has '….{,130}last of all.{,20}…' in place of '….{,130}feature 299.{,20}…' of rank 0"
    with pytest.raises(RankFailure, match=on_every_rank(2, text)):
        ranks(2).run(_read_wide)


# ---- numbers of samples ---------------------------------------------------------------------------------------------


def _scale_arrays() -> list[float]:
    batches = [{"x": np.arange(2 + 2 * rank_here())} for _ in range(2)]
    with balanced(batches, partitioner="identity") as loader:
        return [loader.loss_scale(batch) for batch in loader]


def test_batches_of_arrays_have_a_loss_scale(ranks: Ranks) -> None:
    assert ranks(2).run(_scale_arrays) == [[pytest.approx(2 / 3)] * 2, [pytest.approx(4 / 3)] * 2]


def test_before_the_first_batch_there_is_no_loss_scale() -> None:
    with balanced(Batches([2])) as loader, pytest.raises(ValueError, match="has given none yet"):
        loader.loss_scale(make_batch([1]))


def test_weights_may_be_bfloat16() -> None:
    with balanced(Batches([2]), weights={"w": lambda batch: batch["dense"][:, 0]}) as loader:
        for batch in loader:
            assert loader.sample_weights(batch, "w").tolist() == [0.0, 1.0]


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"length": lambda batch: batch["user"] + 0.5}, "length must give whole numbers, got 0.5; round them"),
        ({"length": lambda batch: batch["user"] + float("nan")}, "length must give whole numbers, got nan"),
        ({"length": lambda batch: batch["user"] + 2**31}, r"length must be at least 0 and less than 2\^31"),
        ({"cost": lambda features: features.rank + 2**61}, r"cost must be at least 0 and sum to less than 2\^62"),
    ],
)
def test_numbers_that_cannot_be_planned_with_are_refused(options: dict[str, Any], text: str) -> None:
    with balanced(Batches([2]), **options) as loader, pytest.raises(LoaderError, match=text):
        users_of(loader)


class Sessions(Batches):
    """Each rank's samples are of one session of three and one of its own."""

    def __iter__(self) -> Any:
        for batch in super().__iter__():
            yield batch | {"session": torch.tensor([0, 0, 0, 1]) + 10 * self.rank}


def _cap_sessions(max_samples: int) -> list[int]:
    schema = BatchSchema(group="session")
    with BalancedDataLoader(Sessions([4]), schema=schema, max_samples=max_samples, partitioner=_on_first) as loader:
        return [len(check_batch(batch)) for batch in loader]


def _on_first(world: Any, runtime: Any) -> Any:
    """All sessions but one on rank 0."""
    return (np.arange(len(world.rank)) == 0).astype(np.int64)


def test_max_samples_counts_the_samples_of_groups(ranks: Ranks) -> None:
    assert ranks(2).run(_cap_sessions, 4) == [[4], [4]]
    with pytest.raises(RankFailure, match="max_samples must allow for every group, but one has 3 samples"):
        ranks(2).run(_cap_sessions, 2)


class BrokenAfterwards(Batches):
    def __iter__(self) -> Any:
        for i, batch in enumerate(super().__iter__()):
            yield batch | {"number": i}


def _derive(batch: Batch) -> int:
    if 1002 in batch["user"].tolist() or 2 in batch["user"].tolist():
        raise KeyError("no such leaf")
    return 0


def _fail_after_the_second_exchange() -> None:
    with balanced(BrokenAfterwards([2] * 3), schema=BatchSchema({"number": Derived(_derive)})) as loader:
        list(loader)


def test_a_failure_after_an_exchange_names_its_batch(ranks: Ranks) -> None:
    with pytest.raises(RankFailure, match=on_every_rank(2, "failed at batch 1: KeyError: 'no such leaf'")):
        ranks(2).run(_fail_after_the_second_exchange)
