"""Caps hold for every partitioner, change no plan that keeps them, and say why where they cannot hold."""

import contextlib
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from fs_data import LoaderError, RuntimeInfo, WorldBatch
from fs_data.partition import NAMES, make
from tests.fs_data.worlds import counts, heavy_tailed, ragged, world

NOW = RuntimeInfo()


def tokens_of(w: WorldBatch, destination: NDArray[np.int64]) -> NDArray[np.int64]:
    total = np.zeros(w.world_size, np.int64)
    np.add.at(total, destination, w.num_tokens)
    return total


@pytest.mark.parametrize("name", NAMES)
@given(costs=ragged(), slack=st.floats(0, 1), data=st.data())
def test_no_rank_gets_more_than_the_caps(name: str, costs: list[list[int]], slack: float, data: st.DataObject) -> None:
    w = world(costs)
    mean, dearest = int(w.num_tokens.sum()) // w.world_size + 1, int(w.num_tokens.max())
    max_tokens = max(1, int((mean + dearest) * (1 + slack)))  # any order of placing fits under mean + dearest
    max_samples = data.draw(st.none() | st.integers(len(w.rank), 2 * len(w.rank)))
    destination = make(name, max_tokens=max_tokens, max_samples=max_samples)(w, NOW)
    assert tokens_of(w, destination).max() <= max_tokens
    if name != "identity" and len(w.rank) >= w.world_size:
        assert counts(w, destination).min() >= 1


@pytest.mark.parametrize("name", NAMES)
@given(costs=ragged(), more=st.integers(0, 3))
def test_no_rank_gets_more_samples_than_the_cap(name: str, costs: list[list[int]], more: int) -> None:
    w = world(costs)
    cap = -(-len(w.rank) // w.world_size) + more
    assert counts(w, make(name, max_samples=cap)(w, NOW)).max() <= cap


@pytest.mark.parametrize("name", NAMES)
def test_a_plan_within_the_caps_stays_as_it_is(name: str) -> None:
    w = heavy_tailed(8, 32)
    roomy = make(name, max_tokens=10**9, max_samples=10**6)
    assert (roomy(w, NOW) == make(name)(w, NOW)).all()


def test_tokens_are_capped_where_costs_alone_are_even() -> None:
    w = replace(world([[5, 5], [5, 5]]), num_tokens=np.array([90, 80, 10, 20]))
    assert tokens_of(w, make("few_moves")(w, NOW)).tolist() == [170, 30]
    capped = make("few_moves", max_tokens=110)(w, NOW)
    assert tokens_of(w, capped).max() <= 110
    assert counts(w, capped).tolist() == [2, 2]


def test_heavy_tails_fit_under_a_cap_close_to_the_mean() -> None:
    w = heavy_tailed(64, 64)
    cap = int(w.num_tokens.sum() / 64 * 1.01)
    plan = make("few_moves", max_tokens=cap)(w, NOW)
    assert tokens_of(w, plan).max() <= cap
    assert tokens_of(w, make("few_moves")(w, NOW)).max() > cap


@given(ragged(), st.integers(1, 200))
def test_a_cap_that_is_too_tight_is_an_error_and_never_a_plan_over_it(costs: list[list[int]], cap: int) -> None:
    w = world(costs)
    fits = int(w.num_tokens.max()) <= cap and int(w.num_tokens.sum()) <= cap * w.world_size
    with pytest.raises(LoaderError, match=str(cap)) if not fits else contextlib.suppress(LoaderError):
        assert tokens_of(w, make("lpt", max_tokens=cap)(w, NOW)).max() <= cap


def test_what_cannot_fit_is_named() -> None:
    w = world([[10, 70], [10, 10]])
    with pytest.raises(LoaderError, match=r"sample 1 has 70 tokens and max_tokens is 60.*truncate histories"):
        make("lpt", max_tokens=60)(w, NOW)
    with pytest.raises(LoaderError, match=r"4 samples and 2 ranks may hold 1 each"):
        make("lpt", max_samples=1)(w, NOW)
    with pytest.raises(LoaderError, match=r"it has 100 tokens and 2 ranks may hold 49 each"):
        make("lpt", max_tokens=49)(world([[25, 25], [25, 25]]), NOW)
    with pytest.raises(LoaderError, match=r"no plan was found with at most 50 tokens and None samples"):
        make("lpt", max_tokens=50)(world([[40, 20], [20, 20]]), NOW)
    with pytest.raises(ValueError, match="max_tokens must be at least 1"):
        make("lpt", max_tokens=0)


def test_the_state_of_the_capped_partitioner_is_the_inner_ones() -> None:
    vbs = make("vbs", max_samples=9)
    vbs(world([[1, 2], [3, 4]]), NOW)
    assert vbs.state_dict()["share"] == [1 << 16] * 2  # pyright: ignore
    assert not hasattr(make("fbs", max_samples=9), "state_dict")
