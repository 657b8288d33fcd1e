"""The trial of balancing on users' data: figures that can be computed by hand, and cost models from text and times."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fs_data.cost import Linear, Power, Quadratic
from fs_data.generate import draw_lengths, num_items_for, write_histories
from fs_data.survey import collisions, describe, sparsities
from fs_data.trial import by_longest, cost_model, measured_cost, read_lengths, sparsity, try_partitioners


def test_figures_of_one_step_are_those_by_hand() -> None:
    lengths = np.array([1, 1, 5, 1], np.int64)  # ranks compute 2 and 6 units, the step takes 6
    dealt, balanced = try_partitioners(
        lengths, ranks=2, batch_size=2, cost=Linear(), partitioners=["identity", "lpt"], seed=None
    )
    assert dealt.straggler_share == pytest.approx(1 - 4 / 6)
    assert dealt.bound == pytest.approx(5 / 4 - 1)
    assert dealt.sparsity == pytest.approx((0 + (1 - 6 / 10)) / 2)
    assert dealt.saved_share == dealt.bytes_moved_share == 0
    assert balanced.straggler_share == pytest.approx(1 - 4 / 6)  # counts stay equal: 5 + 1 against 1 + 1


@given(st.lists(st.integers(0, 50), min_size=12, max_size=40), st.integers(1, 4), st.integers(1, 3))
def test_no_plan_of_few_moves_costs_more_than_as_dealt(lengths: list[int], ranks: int, batch: int) -> None:
    trials = try_partitioners(
        np.array(lengths, np.int64), ranks=ranks, batch_size=batch, partitioners=["identity", "few_moves"]
    )
    assert trials[1].saved_share >= 0
    assert 0 <= trials[1].straggler_share <= trials[0].straggler_share


def test_sparsity_is_equation_1() -> None:
    found = sparsity(np.array([1, 1, 0, 0, 4, 2]), np.array([0, 0, 1, 1, 2, 2]), 4)
    assert found.tolist() == [0, 0, 1 - 6 / 8, 0]


def test_stragglers_and_sparsity_grow_with_the_longest_history() -> None:
    lengths = draw_lengths(np.random.default_rng(0), 64 * 32 * 8, max_length=21_000)
    points = by_longest(lengths, ranks=64, batch_size=32)
    assert [p.straggler_share for p in points] == sorted(p.straggler_share for p in points)
    assert [p.sparsity for p in points] == sorted(p.sparsity for p in points)
    assert all(p.straggler_share > 0.2 for p in points if p.max_uih >= 8_000)  # the paper's Figure 2


def test_too_little_data_says_how_much_there_must_be() -> None:
    with pytest.raises(ValueError, match="4 ranks × 8 = 32 rows, the data has 31; take fewer ranks"):
        try_partitioners(np.ones(31, np.int64), ranks=4, batch_size=8)


def test_cost_models_come_from_text_and_from_times(tmp_path: Path) -> None:
    assert cost_model("linear") == Linear()
    assert cost_model("power:2") == Power(2.0)
    assert cost_model("quadratic:3,4") == Quadratic(3, 4)
    times = tmp_path / "times.csv"
    times.write_text(
        "length,samples,ms\n" + "".join(f"{n},2,{1 + 2 * (n * 2e-3 + n * n * 1e-6)}\n" for n in (10, 900, 5000))
    )
    model = measured_cost(times)
    assert model.per_item_squared / model.per_item == pytest.approx(1e-6 / 2e-3, rel=1e-3)
    assert cost_model(str(times)) == model
    lines = times.read_text().splitlines()
    times.write_text("\ufeff" + "\n".join(f"    {line}" for line in lines))  # by a spreadsheet, or copied from a page
    assert measured_cost(times) == model


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("cubic", "cost must be linear, power:ALPHA"),
        ("power:9", "'power:9' is no cost model: alpha must be over 0"),
        ("quadratic:1,2,3,4", "is no cost model"),
        ("linear:2", "cost must be linear"),
    ],
)
def test_what_is_no_cost_model_is_named(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        cost_model(text)


def test_times_that_say_nothing_are_refused_with_their_line(tmp_path: Path) -> None:
    times = tmp_path / "times.csv"
    times.write_text("length,seconds\n1,2\n")
    with pytest.raises(ValueError, match=r"must have the columns length and ms, it lacks \['ms'\]"):
        measured_cost(times)
    times.write_bytes(b"\x80")
    with pytest.raises(ValueError, match=r"times\.csv must be a CSV file: 'utf-8' codec"):
        measured_cost(times)
    times.write_text("length,ms\n10,1\n\nten,2\n")
    with pytest.raises(ValueError, match="line 4: length, ms and samples must be numbers"):
        measured_cost(times)
    times.write_text("length,ms\n10,1\n20,nan\n")
    with pytest.raises(ValueError, match="line 3: length, ms and samples must be finite"):
        measured_cost(times)
    times.write_text("length,ms\n10,5\n1000,5\n")
    with pytest.raises(ValueError, match="times must grow with length"):
        measured_cost(times)


def test_lengths_come_from_lists_and_from_integers(tmp_path: Path) -> None:
    columns = {"history": [[1, 2], [], [3]], "n": [4, 0, 2], "x": [0.5, 1.0, 2.0], "nested": [[[1], [2]], [], [[3]]]}
    pq.write_table(pa.table(columns), tmp_path / "h.parquet")
    source = str(tmp_path / "h.parquet")
    assert read_lengths(source).tolist() == [2, 0, 1]
    assert read_lengths(source, "nested").tolist() == [2, 0, 1]
    assert read_lengths(source, "n").tolist() == [4, 0, 2]
    with pytest.raises(ValueError, match="'x' must hold lists, or integers"):
        read_lengths(source, "x")
    structs = pa.array([{"id": [1, 2], "ok": [True, False]}])
    pairs = pa.array([[1, 2]], pa.list_(pa.int64(), 2))
    pq.write_table(pa.table({"s": structs, "yes": [True], "pair": pairs}), tmp_path / "h.parquet")
    assert read_lengths(source, "s.id").tolist() == [2]
    for column, message in {
        "s": r"'s' must hold lists, it holds structs: choose one of \['s.id', 's.ok'\]",
        "yes": "'yes' must hold lists, or integers that are lengths; got torch.bool",
        "pair": "got torch.int64 in lists of fixed size 2",
    }.items():
        with pytest.raises(ValueError, match=message):
            read_lengths(source, column)
    with pytest.raises(ValueError, match=r"'s.ok' must hold lists of integer ids"):
        collisions(source, "s.ok", ranks=[1], batch_sizes=[1])


def test_collisions_are_the_ids_of_the_batch_before(tmp_path: Path) -> None:
    pq.write_table(pa.table({"history": [[1, 2], [3], [3, 4, 4], [1], [9], [8]]}), tmp_path / "h.parquet")
    first, second = collisions(str(tmp_path / "h.parquet"), ranks=[1, 2], batch_sizes=[1], pairs=2)
    # {1, 2}, {3}, {3, 4}: none of {3} and half of {3, 4} were there before
    assert (first.ranks, first.collision_share) == (1, pytest.approx((0 + 0.5) / 2))
    # {1, 2, 3}, {1, 3, 4}, {8, 9}
    assert (second.ranks, second.collision_share) == (2, pytest.approx((2 / 3 + 0) / 2))
    assert second.distinct_share == pytest.approx(8 / 9)


def test_generated_histories_have_the_papers_lengths_and_the_wanted_collisions(tmp_path: Path) -> None:
    lengths = describe(draw_lengths(np.random.default_rng(1), 5_000, max_length=21_000))
    assert lengths.over_2_000 > 0.5
    assert lengths.over_16_000 < 0.06
    assert lengths.percentiles[100] == 21_000
    items = num_items_for(0.3, batch_rows=64, max_length=400)
    write_histories(tmp_path / "h.parquet", num_users=640, num_items=items, max_length=400)
    (found,) = collisions(str(tmp_path / "h.parquet"), ranks=[1], batch_sizes=[64], pairs=8)
    assert found.collision_share == pytest.approx(0.3, abs=0.04)
    with pytest.raises(ValueError, match=r"share \d+\.\d% of their ids or more, not 0\.0%"):
        num_items_for(0.0, batch_rows=64, max_length=400)


def test_no_rows_have_no_description() -> None:
    with pytest.raises(ValueError, match="at least one row"):
        describe(np.zeros(0, np.int64))
    assert sparsities(np.ones(4, np.int64), batch_sizes=[8]) == []
