"""The balancing loader with real ranks: samples, order, ends, feeds, weights and state."""

import io
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torchdata.stateful_dataloader import StatefulDataLoader

from fs_data import BalancedDataLoader, BatchSchema, Group, RuntimeInfo, WorldBatch
from tests.fs_data.batches import Batches, Users, check_batch, make_batch, rank_here, stay, users_of, zigzag
from tests.ranks import RankFailure, RankPool

Ranks = Callable[[int], RankPool]
TIMEOUT_S = 20.0


def balanced(loader: Any, **options: Any) -> BalancedDataLoader[Any]:
    return BalancedDataLoader(loader, **{"partitioner": zigzag, "timeout_s": TIMEOUT_S} | options)


# ---- samples --------------------------------------------------------------------------------------------------------


def _users(sizes: Sequence[Sequence[int]], options: dict[str, Any]) -> list[list[int]]:
    with balanced(Batches(sizes[rank_here()]), **options) as loader:
        return users_of(loader)


def _by_step(found: list[list[list[int]]]) -> list[list[int]]:
    return [sorted(user for batch in step for user in batch) for step in zip(*found, strict=True)]


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_each_step_has_the_samples_of_the_plain_loaders_step(ranks: Ranks, world_size: int) -> None:
    sizes = [[5, 7, 2, 6]] * world_size
    plain = [[sorted(b["user"].tolist()) for b in Batches(sizes[r], r)] for r in range(world_size)]
    found = ranks(world_size).run(_users, sizes, {})
    assert _by_step(found) == [sorted(u for rank in plain for u in rank[step]) for step in range(4)]
    assert found[0] != plain[0], "nothing moved, so this proved nothing"


def test_one_process_without_a_group_gets_the_plain_batches() -> None:
    with balanced(Batches([3, 4], rank=0)) as loader:
        assert users_of(loader) == [[0, 1, 2], [3, 4, 5, 6]]


def test_without_balancing_every_rank_keeps_its_batches_in_order(ranks: Ranks) -> None:
    found = ranks(2).run(_users, [[3, 2], [4, 1]], {"partitioner": "identity"})
    assert found == [[[0, 1, 2], [3, 4]], [[1000, 1001, 1002, 1003], [1004]]]


def test_ranks_with_eight_and_one_samples_both_get_some(ranks: Ranks) -> None:
    found = ranks(2).run(_users, [[8, 8], [1, 1]], {})
    assert [len(b) for b in found[0]] == [5, 5]
    assert [len(b) for b in found[1]] == [4, 4]


def test_a_batch_much_larger_than_those_before_grows_the_room_for_lengths(ranks: Ranks) -> None:
    found = ranks(2).run(_users, [[1, 2, 300], [1, 700, 1]], {})
    assert [len(step) for step in _by_step(found)] == [2, 702, 301]


def test_empty_batches_of_one_rank_are_filled_from_the_others(ranks: Ranks) -> None:
    found = ranks(2).run(_users, [[0, 4], [6, 0]], {})
    assert [len(b) for b in found[0]] == [3, 2]


# ---- ends -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "sizes", [[[2, 2, 2], [2, 2]], [[1] * 5, [1] * 3], [[4] * 11, [4] * 10], [[3], [3, 3], [3, 3, 3]], [[], [5, 5]]]
)
def test_ranks_that_run_out_early_share_the_rest(ranks: Ranks, sizes: list[list[int]]) -> None:
    found = ranks(len(sizes)).run(_users_and_weights, sizes)
    steps = max(len(s) for s in sizes)
    assert [len(f) for f in found] == [steps] * len(sizes)
    for step in range(steps):
        here = [f[step] for f in found]
        assert all(users for users, _ in here), "an empty batch"
        real = sorted(u for users, weights in here for u, w in zip(users, weights, strict=True) if w)
        assert real == sorted(
            1000 * r + sum(s[:step]) + i for r, s in enumerate(sizes) if step < len(s) for i in range(s[step])
        )


def _users_and_weights(sizes: list[list[int]]) -> list[tuple[list[int], list[float]]]:
    with balanced(Batches(sizes[rank_here()])) as loader:
        return [(check_batch(b), loader.sample_weights(b).tolist()) for b in loader]


def test_stop_ends_on_all_ranks_at_the_shortest(ranks: Ranks) -> None:
    found = ranks(2).run(_users, [[2, 2, 2], [2, 2]], {"on_exhausted": "stop"})
    assert [len(f) for f in found] == [2, 2]


def test_error_names_the_rank_that_ran_out(ranks: Ranks) -> None:
    with pytest.raises(
        RankFailure, match=r"(?s)rank 0: .*ranks \[1\] have no batch 2.*rank 1: .*ranks \[1\] have no batch 2"
    ):
        ranks(2).run(_users, [[2, 2, 2], [2, 2]], {"on_exhausted": "error"})


def _lengths_agreed(sizes: list[int]) -> int:
    with balanced(Batches([1] * sizes[rank_here()])) as loader:
        return len(loader)


def test_len_is_the_longest_ranks(ranks: Ranks) -> None:
    assert ranks(2).run(_lengths_agreed, [3, 5]) == [5, 5]


def test_len_of_a_loader_without_one_is_a_type_error() -> None:
    with balanced(iter([make_batch([1])])) as loader, pytest.raises(TypeError, match="has no length"):
        len(loader)


def _two_passes() -> list[list[list[int]]]:
    with balanced(Batches([3, 3])) as loader:
        return [users_of(loader), users_of(loader)]


def test_a_second_pass_gives_the_same(ranks: Ranks) -> None:
    for first, second in ranks(2).run(_two_passes):
        assert first == second
        assert len(first) == 2


def _break_together() -> int:
    with balanced(Batches([3] * 6)) as loader:
        for i, _ in enumerate(loader):
            if i == 2:
                break
        return len(users_of(loader))


def test_all_ranks_may_break_together_and_begin_again(ranks: Ranks) -> None:
    assert ranks(2).run(_break_together) == [6, 6]


def test_a_batch_with_fewer_samples_than_ranks_warns_unless_weights_are_used(ranks: Ranks) -> None:
    assert ranks(3).run(_warnings_of_copies) == [(1, 0)] * 3


def _warnings_of_copies() -> tuple[int, int]:
    counts: list[int] = []
    for use_weights in (False, True):
        with (
            balanced(Batches([4, 1] if rank_here() == 0 else [4])) as loader,
            warnings.catch_warnings(record=True) as seen,
        ):
            warnings.simplefilter("always")
            for batch in loader:
                if use_weights:
                    loader.loss_scale(batch)
        counts.append(len([w for w in seen if "copies weigh 0" in str(w.message)]))
    return counts[0], counts[1]


# ---- feeds ----------------------------------------------------------------------------------------------------------


class Recorder(nn.Module):
    """Notes what the loader tells an embedding module."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Any] = []

    def prefetch(self, ids: Any) -> None:
        self.calls.append(
            None if ids is None else [i.tolist() if isinstance(i, torch.Tensor) else i.values.tolist() for i in ids]
        )

    def flush(self) -> None:
        self.calls.append("flush")


def _order_of_calls() -> tuple[list[Any], list[Any]]:
    model = nn.Sequential(nn.Linear(1, 1), Recorder())
    calls = model[1].calls
    with balanced(Batches([2, 2, 2])) as loader:
        loader.feeds(model, {"1": lambda b: [b["user"], b["seq"]]})
        lookups: list[Any] = []
        for batch in loader:
            calls.append("batch")
            lookups.append([batch["user"].tolist(), batch["seq"].values.tolist()])
    return calls, lookups


def test_ids_of_the_next_batch_are_handed_over_before_each_batch(ranks: Ranks) -> None:
    for calls, ids in ranks(2).run(_order_of_calls):
        assert calls == ["flush", ids[0], ids[1], "batch", ids[2], "batch", None, "batch", None, "flush"]


def test_feeds_names_the_modules_that_look_ids_up() -> None:
    model = nn.ModuleDict({"table": Recorder(), "head": nn.Linear(1, 1)})
    with balanced(Batches([1], rank=0)) as loader:
        with pytest.raises(ValueError, match=r"\['head'\] have no prefetch.*\['table'\]"):
            loader.feeds(model, {"head": lambda b: [], "table": lambda b: []})
        with pytest.raises(ValueError, match=r"'table' does not take features by name: say which ids"):
            loader.feeds(model)


# ---- weights --------------------------------------------------------------------------------------------------------


def _gradient(world_size: int) -> tuple[list[float], list[float]]:
    """The gradient averaged over ranks as DDP does, for the token mean plus the sample mean; and one process's."""

    def losses(batch: Any, w: torch.Tensor) -> torch.Tensor:
        pooled = torch.segment_reduce(
            batch["seq"].values.double() / 1000, "sum", lengths=batch["seq"].lengths, initial=0.0
        )
        return torch.tanh(w[0] * pooled + w[1] * (batch["user"].double() % 7))  # (B,)

    def tokens(batch: Any) -> torch.Tensor:
        return batch["seq"].lengths

    sizes = [[5, 3], [1, 2], [7, 0], [2, 1]][:world_size]
    w = torch.tensor([0.3, -0.2], dtype=torch.float64, requires_grad=True)
    with balanced(Batches(sizes[rank_here()]), weights={"tokens": tokens}) as loader:
        for batch in loader:
            n = tokens(batch)
            token_mean = (losses(batch, w) * n).sum() / n.sum().clamp(min=1)
            total = (
                token_mean * loader.loss_scale(batch, "tokens")
                + (losses(batch, w) * loader.sample_weights(batch)).sum()
            )
            total.backward()
    assert w.grad is not None
    average = w.grad / world_size
    dist.all_reduce(average)

    whole = w.detach().clone().requires_grad_()
    for step in range(2):
        union = make_batch([1000 * r + sum(s[:step]) + i for r, s in enumerate(sizes) for i in range(s[step])])
        n = tokens(union)
        ((losses(union, whole) * n).sum() / n.sum() + losses(union, whole).mean()).backward()
    assert whole.grad is not None
    return average.tolist(), whole.grad.tolist()


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_gradients_of_uneven_batches_equal_one_process_on_the_union(ranks: Ranks, world_size: int) -> None:
    for found, wanted in ranks(world_size).run(_gradient, world_size):
        np.testing.assert_allclose(found, wanted, rtol=1e-10)


def test_a_foreign_batch_has_no_loss_scale() -> None:
    with balanced(Batches([2], rank=0)) as loader:
        batch = next(iter(loader))
        assert loader.loss_scale(dict(batch)) == 1.0  # rebuilt around the same tensors, as some trainers do
        with pytest.raises(ValueError, match="one of the last 4 that this loader gave"):
            loader.loss_scale(make_batch([1]))
        with pytest.raises(ValueError, match=r"task must be one of \['samples'\], got 'clicks'"):
            loader.loss_scale(batch, "clicks")


# ---- groups ---------------------------------------------------------------------------------------------------------


def _groups() -> list[list[int]]:
    schema = BatchSchema(group=Group(lambda batch: batch["user"] % 5))
    with balanced(Batches([20, 13]), schema=schema) as loader:
        return [[u % 5 for u in users] for users in users_of(loader)]


def test_samples_of_a_group_end_on_one_rank(ranks: Ranks) -> None:
    first, second = ranks(2).run(_groups)
    for mine, theirs in zip(first, second, strict=True):
        assert mine
        assert theirs
        assert not set(mine) & set(theirs)


# ---- state ----------------------------------------------------------------------------------------------------------


def stateful(size: int, workers: int = 0) -> StatefulDataLoader[Any]:
    return StatefulDataLoader(
        Users(size),
        batch_size=3,
        collate_fn=make_batch,
        num_workers=workers,
        generator=torch.Generator().manual_seed(7),
        shuffle=True,
    )


def _resumed(sizes: list[int], kind: str, workers: int) -> None:
    """Every state, loaded into a fresh loader, continues with exactly the batches that were left."""

    def make() -> BalancedDataLoader[Any]:
        inner = Batches([3] * sizes[rank_here()]) if kind == "plain" else stateful(3 * sizes[rank_here()], workers)
        return balanced(inner)

    states: list[bytes] = []
    rest: list[list[int]] = []
    with make() as loader:
        states.append(_saved(loader))
        for batch in loader:
            rest.append(check_batch(batch))
            states.append(_saved(loader))
        states.append(_saved(loader))  # after the end: the next pass is whole
        whole = len(rest)
        following = users_of(loader) if kind == "stateful" else []
    assert whole == max(sizes)
    for done, state in enumerate(states):
        with make() as loader:
            loader.load_state_dict(torch.load(io.BytesIO(state), weights_only=True))
            found = users_of(loader)
            if done <= whole:
                assert found == rest[done:], f"after {done} batches"
            elif kind == "stateful":  # a whole pass; torchdata itself shuffles it otherwise than an uninterrupted run
                assert [len(b) for b in found] == [len(b) for b in following]
        dist.barrier()


def _saved(loader: BalancedDataLoader[Any]) -> bytes:
    data = io.BytesIO()
    torch.save(loader.state_dict(), data)
    return data.getvalue()


@pytest.mark.parametrize(
    ("sizes", "kind", "workers"), [([4, 4], "stateful", 0), ([2, 5], "stateful", 0), ([3, 1], "plain", 0)]
)
def test_resumes_after_every_batch(ranks: Ranks, sizes: list[int], kind: str, workers: int) -> None:
    ranks(2).run(_resumed, sizes, kind, workers)


def _state_keys() -> tuple[list[str], list[str]]:
    with balanced(stateful(9)) as loader:
        before = list(loader.state_dict())
        next(iter(loader))
        return before, list(loader.state_dict())


def test_state_has_its_keys_before_the_first_batch_and_names_the_rank(ranks: Ranks) -> None:
    for rank, (before, after) in enumerate(ranks(2).run(_state_keys)):
        assert before == after == ["version", "world_size", f"dp_rank_{rank}"]


def test_state_of_another_world_size_is_refused() -> None:
    with balanced(Batches([1], rank=0)) as loader:
        state = loader.state_dict() | {"world_size": 4}
        with pytest.raises(ValueError, match="saved by 4 ranks and cannot be loaded by 1"):
            loader.load_state_dict(state)


# ---- agreement ------------------------------------------------------------------------------------------------------


def _different_settings() -> None:
    with balanced(Batches([2]), on_exhausted="stop" if rank_here() else "balance") as loader:
        users_of(loader)


def test_different_settings_are_an_error_that_shows_them(ranks: Ranks) -> None:
    culprit = "rank 1 has 'on_exhausted=stop' in place of 'on_exhausted=balance'"
    with pytest.raises(RankFailure, match=f"(?s)rank 0: .*{culprit}.*rank 1: .*{culprit}"):
        ranks(2).run(_different_settings)


def _different_batches() -> None:
    batch = make_batch([1, 2])
    if rank_here() == 1:
        batch["dense"] = batch["dense"].float()
    with balanced([batch]) as loader:
        list(loader)


def test_different_batches_are_an_error_that_names_the_leaf(ranks: Ranks) -> None:
    culprit = "rank 1 has 'dense: .*float32.*' in place of 'dense: .*bfloat16"
    with pytest.raises(RankFailure, match=f"(?s)rank 0: .*{culprit}.*rank 1: .*{culprit}"):
        ranks(2).run(_different_batches)


def test_a_plan_that_differs_between_ranks_names_the_odd_one(ranks: Ranks) -> None:
    with pytest.raises(
        RankFailure, match=r"(?s)rank 0: .*Disagreement.*rank 2 has 'plan.*deterministic.*rank 2: .*Disagreement"
    ):
        ranks(3).run(_plans_differ_on_two)


def _odd_on_two(world: WorldBatch, runtime: RuntimeInfo) -> Any:
    plan = stay(world, runtime)
    if rank_here() == 2:
        plan[0] = 1
    return plan


def _plans_differ_on_two() -> None:
    with balanced(Batches([4]), partitioner=_odd_on_two) as loader:
        users_of(loader)


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (lambda w: w.rank + 1, r"must give ranks from 0 to 0, got 1 to 1"),
        (lambda w: w.rank[:-1], r"must give \(3,\) integers, the rank of each sample, got \(2,\)"),
        (lambda w: w.rank.astype(float), r"must give \(3,\) integers, the rank of each sample, got \(3,\) float64"),
    ],
)
def test_a_wrong_plan_is_refused(plan: Callable[[WorldBatch], Any], message: str) -> None:
    with (
        balanced(Batches([3], rank=0), partitioner=lambda world, runtime: plan(world)) as loader,
        pytest.raises(RuntimeError, match=message),
    ):
        list(loader)
