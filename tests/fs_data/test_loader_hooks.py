"""Hooks, figures and devices: what the loader does around a model's step, beyond giving batches."""

import io
import logging
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from fs_data import BalancedDataLoader, BatchSchema, PerBatch
from fs_data.device import Lane, map_parts
from fs_data.hooks import ComputeTimes, Pace
from tests.fs_data.batches import Batches, check_batch, make_batch, rank_here, users_of, zigzag
from tests.ranks import RankFailure, RankPool

Ranks = Callable[[int], RankPool]


SCHEMA = BatchSchema({"mine.moves": PerBatch()})


def balanced(loader: Any, **options: Any) -> BalancedDataLoader[Any]:
    return BalancedDataLoader(loader, **{"partitioner": zigzag, "timeout_s": 20.0} | options)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = Embedding()
        self.head = nn.Linear(1, 1)
        self.seconds = 0.0

    def forward(self, batch: Any) -> torch.Tensor:
        x = self.embedding(batch["user"])
        time.sleep(self.seconds)
        return self.head(x).mean()


class Embedding(nn.Module):
    """An id consumer whose lookup takes a while, as if it waited for other ranks."""

    def prefetch(self, ids: Any) -> None: ...

    def flush(self) -> None: ...

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        time.sleep(0.05)
        return ids[:, None].float()


def _train(steps: int, *, skip_on_rank: int | None = None) -> list[int]:
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with balanced(Batches([3] * steps)) as loader:
        loader.attach(model, optimizer)
        users: list[int] = []
        for step, batch in enumerate(loader):
            users += check_batch(batch)
            model(batch).backward()
            if step == 2 and skip_on_rank == rank_here():
                continue
            optimizer.step()
    assert not model._forward_hooks, "close() leaves no hooks behind"
    return users


def test_an_attached_loader_gives_every_batch(ranks: Ranks) -> None:
    first, second = ranks(2).run(_train, 5)
    assert sorted(first + second) == [*range(15), *range(1000, 1015)]


def _skip() -> None:
    _train(6, skip_on_rank=1)


def test_a_step_left_out_on_one_rank_is_an_error_on_all(ranks: Ranks) -> None:
    text = r"all ranks must take the same optimizer steps: before batch 3 they had taken \[3, 2\]"
    with pytest.raises(RankFailure, match=f"(?s)rank 0: .*{text}.*rank 1: .*{text}"):
        ranks(2).run(_skip)


def _without_forward() -> list[int]:
    model = Model()
    with balanced(Batches([3] * 4)) as loader:
        loader.attach(model, torch.optim.SGD(model.parameters(), lr=0.1))
        return [len(b["user"]) for b in loader]


def test_stages_that_no_hook_launched_run_in_next(ranks: Ranks) -> None:
    assert ranks(2).run(_without_forward) == [[3] * 4] * 2


def _stage_order() -> list[Any]:
    """Which stages of the next exchange have started at each point of a step."""
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with balanced(Batches([3] * 4)) as loader:
        loader.attach(model, optimizer)
        pace = loader._exchange.pace
        batches = iter(loader)
        seen: list[Any] = []
        for batch in batches:
            here = [pace._allowed]
            handle = model.head.register_forward_pre_hook(lambda *_, here=here: here.append(pace._allowed))
            loss = model(batch)
            here.append(pace._allowed)
            loss.backward()
            here.append(pace._allowed)
            optimizer.step()
            handle.remove()
            seen.append(here)
    return seen


def test_stages_start_after_embeddings_forward_and_backward(ranks: Ranks) -> None:
    for seen in ranks(2).run(_stage_order):
        assert seen == [[0, 1, 2, 3]] * 4


def _compute_times() -> list[list[int]]:
    model = Model()
    model.seconds = 0.02 * (1 + rank_here())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    seen: list[list[int]] = []

    def partition(world: Any, runtime: Any) -> Any:
        seen[:] = runtime.compute_ns.tolist()
        return zigzag(world, runtime)

    with balanced(Batches([3] * 8), partitioner=partition) as loader:
        loader.attach(model, optimizer)
        for batch in loader:
            model(batch).backward()
            optimizer.step()
    return seen


def test_plans_see_each_ranks_compute_without_its_waits(ranks: Ranks) -> None:
    first, second = ranks(2).run(_compute_times)
    assert first == second
    assert len(first) >= 3
    for mine, theirs in first:  # the lookup's 50 ms, a wait, are not in it
        assert 0.02e9 <= mine < 0.04e9
        assert 0.04e9 <= theirs < 0.06e9


def test_compute_times_are_forgotten_after_a_few_steps() -> None:
    times = ComputeTimes()
    for step in range(10):
        times.begin_step(step)
        times.add(lambda: 0.5)
    assert times.of(9) == times.of(6) == 500_000_000
    assert times.of(3) == -1


def test_pace_holds_only_what_is_attached() -> None:
    pace = Pace()
    pace.hold()
    pace.wait_for(3)  # would hang
    pace.attached = True
    pace.hold()
    pace.allow(2)
    pace.wait_for(2)
    assert pace._allowed == 2


# ---- figures --------------------------------------------------------------------------------------------------------


class Writer:
    def __init__(self) -> None:
        self.scalars: dict[tuple[str, int], float] = {}

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> None:
        self.scalars[tag, global_step] = scalar_value


def _figures() -> tuple[Any, dict[tuple[str, int], float], str]:
    log = io.StringIO()
    handler, logger = logging.StreamHandler(log), logging.getLogger("fs_data.loader")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    writer = Writer()
    try:
        with balanced(Batches([8, 8, 8, 8]), writer=writer, log_every=2) as loader:
            users_of(loader)
            return loader.stats(), writer.scalars, log.getvalue()
    finally:
        logger.removeHandler(handler)
        logger.setLevel(logging.NOTSET)


def test_figures_agree_on_all_ranks_and_reach_writer_and_log(ranks: Ranks) -> None:
    (first, scalars, log), (second, _, _) = ranks(2).run(_figures)
    assert first.steps == second.steps == 4
    for name in ("imbalance_before", "imbalance", "bound", "bytes_moved", "busiest_rank_bytes", "peak_tokens"):
        assert getattr(first, name) == getattr(second, name), name
    assert 0 <= first.bound <= first.imbalance + 1e-9
    assert first.imbalance < first.imbalance_before
    assert 0 < first.bytes_moved_share < 1
    assert first.busiest_rank_bytes * first.steps <= first.bytes_moved
    assert first.exposed_wait_ms > 0
    assert {"stage1_gather_lengths", "plan", "stage3_shuffle"} <= set(first.stage_ms)
    assert scalars["fs_data/imbalance", 3] == first.last.imbalance
    assert ("fs_data/stage_ms/plan", 0) in scalars
    assert [line.split(":")[0] for line in log.splitlines()] == ["rank 0", "rank 0"]
    assert "batch 1: imbalance" in log


def test_stages_are_ranges_of_the_profiler() -> None:
    config = torch.profiler._ExperimentalConfig(profile_all_threads=True)
    with (
        torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], experimental_config=config) as profile,
        balanced(Batches([3, 3], rank=0)) as loader,
    ):
        users_of(loader)
    names = {event.name for event in profile.events() or []}
    assert {"fs_data::next", "fs_data::stage1_gather_lengths", "fs_data::stage3_shuffle"} <= names


# ---- devices --------------------------------------------------------------------------------------------------------


class Custom:
    """A batch class of the user's own, which knows how to move."""

    def __init__(self, user: torch.Tensor, moves: int = 0) -> None:
        self.user, self.moves = user, moves

    def to(self, device: torch.device) -> "Custom":  # takes no non_blocking
        return Custom(self.user.to(device), self.moves + 1)


def test_a_class_that_knows_how_to_move_is_asked_to() -> None:
    with balanced([{"mine": Custom(torch.arange(3)), "other": torch.zeros(3)}], device="cpu", schema=SCHEMA) as loader:
        (batch,) = loader
    assert batch["mine"].moves == 1
    assert batch["mine"].user.tolist() == [0, 1, 2]


def test_batches_reach_the_device_they_are_wanted_on() -> None:
    with balanced(Batches([3], rank=0), device="meta") as loader:
        (batch,) = loader
    assert batch["user"].device.type == batch["seq"].values.device.type == "meta"
    assert batch["name"] == ["user 0", "user 1", "user 2"]


def test_moving_keeps_containers_and_what_cannot_move() -> None:
    batch = (make_batch([1]), [torch.zeros(2), "text"], None)
    moved = map_parts(batch, lambda part: part.to("meta"))
    assert type(moved) is tuple
    assert moved[1][0].is_meta
    assert moved[1][1:] == ["text"]
    assert moved[2] is None


def test_host_batches_need_no_stream() -> None:
    lane = Lane(torch.device("cpu"))
    with lane.enter(make_batch([1]), None):
        assert lane.move(make_batch([1])).ready is None
