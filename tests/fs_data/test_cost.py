"""Cost models: worked values, laws, and calibration from times that are known."""

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fs_data import Features, LoaderError
from fs_data.cost import NAMES, Calibrated, Linear, Moments, Power, Quadratic, make, quantise, rank_sums
from fs_data.shuffle_plan import Plan


def features(lengths: Any, *, num_ranks: int = 1, content: Any = None) -> Features:
    """Histories of `lengths`, dealt in equal runs; `content` gives each sample's candidates' lengths."""
    tokens = np.asarray(lengths, np.int64)
    inner = [[]] * len(tokens) if content is None else content
    zero = np.zeros(len(tokens), np.int64)
    return Features(
        rank=np.repeat(np.arange(num_ranks), len(tokens) // num_ranks),
        num_tokens=tokens,
        num_candidates=np.array([len(x) for x in inner], np.int64),
        content_sum=zero + np.array([sum(x) for x in inner], np.int64),
        content_sum_of_squares=zero + np.array([sum(y * y for y in x) for x in inner], np.int64),
        num_bytes=8 * tokens,
    )


def as_dealt(f: Features, num_ranks: int) -> Plan:
    n = len(f.rank)
    return Plan(
        world_size=num_ranks, sample=np.arange(n), destination=f.rank, is_copy=np.zeros(n, np.bool_),
        features=f, cost=f.num_tokens,
    )  # fmt: skip


def test_the_models_give_what_their_formulas_say() -> None:
    f = features([0, 3, 10], content=[[], [2, 4], []])
    assert Linear(per_sample=5)(f).tolist() == [5, 14, 15]
    assert Quadratic(7, 2, 1)(f).tolist() == [1, 7 * 9 + 2 * (9 + 4 + 16) + 1, 7 * 10 + 2 * 100 + 1]
    assert Power(2.0)(f).tolist() == [0, 81_000, 100_000]
    assert Power(1.5)(features([4, 2])).tolist() == [8000, 2828]


def test_the_default_is_the_static_quadratic_model() -> None:
    assert make()(features([3500])).tolist() == [10 * 1024**2 * 3500 + 2048 * 3500**2]


@pytest.mark.parametrize("name", NAMES)
@given(lengths=st.lists(st.integers(0, 100_000), min_size=1, max_size=30))
def test_longer_histories_never_cost_less(name: str, lengths: list[int]) -> None:
    cost = make(name)(features(sorted(lengths)))
    assert cost.dtype == np.int64
    assert (np.diff(cost) >= 0).all()
    assert (cost >= 0).all()


@pytest.mark.parametrize("model", [Quadratic(), Power(3.0)])
def test_costs_that_would_overflow_are_an_error(model: Any) -> None:
    with pytest.raises(LoaderError, match=r"less than 2\^62.*divide the model's coefficients"):
        model(features([2**40] * 4))


def test_a_wrong_name_or_setting_says_what_is_right() -> None:
    with pytest.raises(ValueError, match=r"quadratic.*got 'cubic'"):
        make("cubic")
    with pytest.raises(ValueError, match="alpha must be over 0"):
        make("power", alpha=0)
    with pytest.raises(ValueError, match="per_item must be an integer"):
        make("quadratic", per_item=-1)
    with pytest.raises(ValueError, match="min_steps ≤ freeze_after"):
        make("calibrated", min_steps=9, freeze_after=8)
    with pytest.raises(TypeError, match="function of Features, got 3"):
        make(3)  # pyright: ignore[reportArgumentType]


# ---- calibration ----------------------------------------------------------------------------------------------------

TRUE = (4e6, 150.0, 0.02)  # ns: 4 ms a step, 150 ns an item, 0.02 ns a pair


def measured(plan: Plan, true: tuple[float, float, float], rng: np.random.Generator | None = None) -> Any:
    time = rank_sums(plan) @ np.asarray(true)
    return np.rint(time * (1 if rng is None else rng.normal(1, 0.03, len(time)))).astype(np.int64)


def batches(num_steps: int, num_ranks: int = 8, batch: int = 16) -> list[Plan]:
    rng = np.random.default_rng(0)
    draw = rng.lognormal(np.log(3500), 0.9, (num_steps, num_ranks * batch)).clip(1, 21_000)
    return [as_dealt(features(x.astype(np.int64), num_ranks=num_ranks), num_ranks) for x in draw]


@pytest.mark.parametrize("true", [TRUE, (0.0, 150.0, 0.02), (4e6, 0.0, 0.02), (4e6, 150.0, 0.0), (7e6, 0.0, 0.0)])
def test_exact_times_give_the_coefficients_back(true: tuple[float, float, float]) -> None:
    moments = Moments()
    for plan in batches(20):
        moments.add(rank_sums(plan), measured(plan, true))
    assert moments.fit() == pytest.approx(np.asarray(true), rel=1e-3, abs=1e-4)


@given(st.lists(st.tuples(st.integers(0, 99), st.integers(0, 99), st.integers(0, 999)), min_size=1, max_size=12))
def test_the_fit_is_never_negative_and_no_neighbour_is_better(rows: list[tuple[int, int, int]]) -> None:
    data = np.array([(1, a, b) for a, b, _ in rows], np.float64)
    time = np.array([t for *_, t in rows], np.float64)
    moments = Moments()
    moments.add(data.astype(np.int64), time.astype(np.int64))
    found = moments.fit()
    assert (found >= 0).all()

    def error(c: Any) -> float:
        return float(((data @ c - time) ** 2).sum())

    for step in (1e-2, 1.0):
        for i in range(3):
            for sign in (-1, 1):
                other = found.copy()
                other[i] = max(0.0, other[i] + sign * step)
                assert error(found) <= error(other) + 1e-6 * (1 + error(other))


def test_noisy_times_teach_the_model_which_samples_are_dear() -> None:
    model, rng = Calibrated(Linear(), warm_up=2, min_steps=5, refit_every=5, freeze_after=40), np.random.default_rng(1)
    plans = batches(60)
    for plan in plans:
        model.observe(plan, measured(plan, TRUE, rng))
        model.adopt(np.asarray([*model.coefficients(), 0]))
    assert model.frozen
    lengths = np.array([1000, 5000, 21_000])
    learned = model(features(lengths)) / 2**20
    assert learned == pytest.approx(TRUE[1] * lengths + TRUE[2] * lengths**2, rel=0.1)


def test_costs_are_those_to_begin_with_until_enough_is_measured_and_freeze_after() -> None:
    model = Calibrated(Linear(), warm_up=1, min_steps=3, refit_every=1, freeze_after=4)
    f, history = features([10, 20]), []
    for plan in batches(9):
        model.observe(plan, measured(plan, (0.0, 5.0 + len(history), 0.0)))
        history.append(model.coefficients())
        model.adopt(np.asarray([*model.coefficients(), 0]))
        if len(history) < 4:
            assert model(f).tolist() == [10, 20]
    assert history[2] == (0, 0, 0)
    assert history[3] != history[4]
    assert len(set(history[4:])) == 1


def test_ranks_use_rank_0s_coefficients_not_their_own() -> None:
    model = Calibrated(warm_up=0, min_steps=1)
    plan = batches(1)[0]
    model.observe(plan, measured(plan, TRUE))
    model.adopt(np.asarray([0, 3, 2, 0]))
    assert model(features([10])).tolist() == [3 * 10 + 2 * 100]


def test_times_that_do_not_depend_on_lengths_leave_the_costs_alone() -> None:
    model = Calibrated(Linear(), warm_up=0, min_steps=1)
    for plan in batches(5):
        model.observe(plan, measured(plan, (9e6, 0.0, 0.0)))
    model.adopt(np.asarray([*model.coefficients(), 0]))
    assert model(features([10, 20])).tolist() == [10, 20]


def test_a_resumed_model_goes_on_as_if_never_stopped() -> None:
    plans = batches(30)
    whole, first, second = (Calibrated(warm_up=2, min_steps=3, refit_every=4, freeze_after=20) for _ in range(3))
    for i, plan in enumerate(plans):
        whole.observe(plan, measured(plan, TRUE))
        (first if i < 11 else second).observe(plan, measured(plan, TRUE))
        if i == 10:
            second.load_state_dict(json.loads(json.dumps(first.state_dict())))
        assert (first if i < 10 else second).coefficients() == whole.coefficients()


def test_coefficients_keep_five_digits() -> None:
    assert np.asarray(quantise(np.asarray(TRUE))) / 2**20 == pytest.approx(np.asarray(TRUE), rel=1e-4)
