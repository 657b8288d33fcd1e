"""Predicates: the rows that plain filters give, whatever the footers say; and states that outlive the process."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from fs_data.parquet import ParquetError, ParquetUIHDataset
from tests.fs_data.test_parquet import write


def users(path: Path, where: Any) -> list[int]:
    return [n for batch in ParquetUIHDataset(path, batch_size=4, columns=["user"], where=where) for n in batch["user"]]


@pytest.mark.parametrize(
    "values",
    [lambda: {3, 12}, lambda: (n for n in (3, 12)), lambda: np.array([12, 3, 3]), lambda: {3: "a", 12: "b"}.keys()],
)
def test_any_collection_of_values_will_do(tmp_path: Path, values: Callable[[], Any]) -> None:
    write(tmp_path / "h.parquet", [10, 10])
    assert users(tmp_path, [("user", "in", values())]) == [3, 12]
    assert users(tmp_path, [("user", "not in", values())]) == [n for n in range(20) if n not in (3, 12)]


@pytest.mark.parametrize(
    ("where", "rows"),
    [
        ([("x", "!=", 1.0)], [2, 5]),
        ([("x", "not in", [1.0])], [2, 4, 5]),  # a null is none of the values
        ([("x", "in", [float("nan")])], [2]),
        ([("x", "in", [None])], [4]),
        ([("x", "not in", [None])], [0, 1, 2, 3, 5]),
        ([("x", "in", [])], []),
        ([("n", "not in", [7])], [3, 4, 5]),
    ],
)
def test_bounds_that_say_nothing_of_nan_and_null_leave_out_none(tmp_path: Path, where: Any, rows: list[int]) -> None:
    x = pa.array([1.0, 1.0, float("nan"), 1.0, None, 2.0])
    table = pa.table({"user": range(6), "x": x, "n": [7, 7, 7, 8, 8, 8]})
    pq.write_table(table, tmp_path / "h.parquet", row_group_size=3)
    assert users(tmp_path, where) == rows == table.filter(pq.filters_to_expression(where))["user"].to_pylist()


@pytest.mark.parametrize(
    ("where", "message"),
    [
        ([("user", "~", 3)], r"where must hold terms \(column, operator, value\)"),
        (("user", "=", 3), "where must be a list of at least one term"),
        ([], "where must be a list of at least one term"),
        ([("user", "in", 3)], "where must give 'in' a list of values"),
        ([("country", "not in", "DE")], "where must give 'not in' a list of values"),
        ([("user", "=", None)], r"where cannot compare with None, .* ask by 'in' \[None\]"),
        ([("user", ">", "a")], "where must compare column 'user' with values of its type, int64, got .*'a'"),
        ([("user", "in", ["a"])], "where must compare column 'user' with values of its type, int64, got .*'a'"),
        ([("user", "<", 2**70)], "where must compare column 'user' with values of its type, int64, got"),
        ([("history", "=", 1)], "where must compare column 'history' with values of its type, list"),
    ],
)
def test_a_predicate_that_cannot_work_is_refused_at_once(tmp_path: Path, where: Any, message: str) -> None:
    write(tmp_path / "h.parquet", [3])
    with pytest.raises(ValueError, match=message):
        ParquetUIHDataset(tmp_path, batch_size=2, where=where)
    with pytest.raises(ParquetError, match=r"must have the columns \['age'\]"):
        ParquetUIHDataset(tmp_path, batch_size=2, where=[("age", ">", 3)])


def test_lists_without_values_and_both_zeros_mean_what_they_say(tmp_path: Path) -> None:
    label = pa.array(["a", None, "b"]).dictionary_encode()
    pq.write_table(pa.table({"user": range(3), "label": label, "x": [0.0, None, -0.0]}), tmp_path / "h.parquet")
    for where, kept in {
        ("label", "in", ()): [], ("label", "not in", ()): [0, 1, 2], ("label", "in", (None,)): [1],
        ("label", "not in", (None,)): [0, 2], ("x", "in", (-0.0,)): [0, 2], ("x", "not in", (0.0,)): [1],
    }.items():  # fmt: skip
        assert users(tmp_path, [where]) == kept, where


def test_a_set_of_texts_is_the_same_predicate_in_each_process(tmp_path: Path) -> None:
    pq.write_table(pa.table({"user": range(3), "text": ["a", "b", "c"]}), tmp_path / "h.parquet")
    script = (
        "import sys\nfrom fs_data.parquet import ParquetUIHDataset\n"
        "where = [('text', 'in', {f'{n} of a hundred' for n in range(100)})]\n"
        "print(ParquetUIHDataset(sys.argv[1], columns=['user'], batch_size=2, where=where).state_dict()['order'])"
    )
    states = [
        subprocess.run(
            [sys.executable, "-c", script, tmp_path], env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True, text=True, check=True,
        ).stdout
        for seed in ("1", "2")
    ]  # fmt: skip
    assert states[0] == states[1]
    assert len(states[0]) < 600


def test_a_state_of_other_values_of_a_long_list_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "h.parquet", [3])

    def make(values: Any) -> ParquetUIHDataset:
        return ParquetUIHDataset(tmp_path, batch_size=2, where=[("user", "in", values)])

    values = np.arange(5000)
    state = make(values).state_dict()
    make(values[::-1].tolist()).load_state_dict(state)
    values[2500] = 9999
    with pytest.raises(ParquetError, match="must be loaded for the same shuffle, seed, quotas and predicate"):
        make(values).load_state_dict(state)
