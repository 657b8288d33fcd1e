"""The example's batches: targets shifted by one, negatives that no rank or restart can change."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from examples.data import NextItemTask, RankingTask, jagged, unseen_items
from fs_data import JaggedColumn

histories = st.lists(st.lists(st.integers(1, 30), max_size=8), min_size=1, max_size=6)


def column(rows: list[list[int]]) -> JaggedColumn:
    values = torch.tensor([x for row in rows for x in row], dtype=torch.int64)
    return JaggedColumn.from_lengths(values, torch.tensor([len(row) for row in rows]))


def rows_of(column: JaggedColumn) -> list[list[int]]:
    return [part.tolist() for part in column.values.split(column.lengths.tolist())]


@given(histories)
def test_each_item_is_followed_by_its_next(rows: list[list[int]]) -> None:
    batch = NextItemTask(num_items=40)({"user": torch.arange(len(rows)), "history": column(rows)})
    seq, pos, neg = (rows_of(c) for c in jagged(batch, "seq", "pos", "neg"))
    assert seq == [row[:-1] for row in rows]
    assert pos == [row[1:] for row in rows]
    assert [len(row) for row in neg] == [len(row) for row in pos]
    assert all(not set(row) & set(negatives) for row, negatives in zip(rows, neg, strict=True))


@given(histories, st.randoms())
def test_a_samples_negatives_do_not_depend_on_its_batch(rows: list[list[int]], random) -> None:
    task = NextItemTask(num_items=40, seed=3)
    together = rows_of(jagged(task({"user": torch.arange(len(rows)), "history": column(rows)}), "neg")[0])
    order = list(range(len(rows)))
    random.shuffle(order)
    moved = task({"user": torch.tensor(order), "history": column([rows[i] for i in order])})
    assert rows_of(jagged(moved, "neg")[0]) == [together[i] for i in order]


def test_negatives_change_with_the_epoch() -> None:
    task = NextItemTask(num_items=10_000)
    batch = {"user": torch.tensor([1]), "history": column([list(range(1, 30))])}
    first = jagged(task(batch), "neg")[0].values
    task.epoch = 1
    assert not torch.equal(first, jagged(task(batch), "neg")[0].values)


def test_the_true_item_is_first_and_the_test_sees_the_validation_item() -> None:
    batch = {
        "user": torch.tensor([0, 8, 1]),
        "history": column([[1, 2], [9, 9], [3]]),
        "validation": torch.tensor([4, 0, 5]),
        "test": torch.tensor([6, 0, 7]),  # user 8 has too few items to hold any out
    }
    ranked = RankingTask(num_items=200, split="test", num_negatives=20)(batch)
    assert rows_of(jagged(ranked, "seq")[0]) == [[1, 2, 4], [3, 5]]
    candidates = ranked["candidates"]
    assert isinstance(candidates, torch.Tensor)
    assert candidates[:, 0].tolist() == [6, 7]
    assert not set(candidates[0, 1:].tolist()) & {1, 2, 4, 6}


def test_users_without_a_history_are_not_ranked_by_that_of_another() -> None:
    batch = {
        "user": torch.tensor([0, 1]),
        "history": column([[1, 2], []]),
        "validation": torch.tensor([4, 5]),
        "test": torch.tensor([6, 7]),
    }
    ranked = [jagged(RankingTask(num_items=200, split=split)(batch), "seq")[0] for split in ("validation", "test")]
    assert [rows_of(seq) for seq in ranked] == [[[1, 2]], [[1, 2, 4], [5]]]


def test_a_column_of_another_kind_is_named() -> None:
    batch = {"user": torch.arange(1), "history": torch.arange(1)}
    with pytest.raises(ValueError, match="column 'history' must hold a list of items a row, got Tensor"):
        NextItemTask(num_items=9)(batch)
    with pytest.raises(ValueError, match="column 'user' must hold one value a row, got JaggedColumn"):
        NextItemTask(num_items=9)({"user": column([[1]]), "history": column([[1]])})


def test_a_history_of_all_items_is_an_error_that_names_the_user() -> None:
    with pytest.raises(ValueError, match="user 9 has seen nearly all of the 3 items"):
        unseen_items(column([[1, 2, 3]]), torch.tensor([9]), torch.tensor([1]), 3, salt=0)
