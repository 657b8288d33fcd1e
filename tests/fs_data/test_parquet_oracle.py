"""Random files, predicates and stops against a naive reading: whole tables, row by row in Python, without footers."""

import datetime
import tempfile
from collections.abc import Iterator
from decimal import Decimal
from operator import eq, ge, gt, le, lt, ne
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from hypothesis import given, settings
from hypothesis import strategies as st

from fs_data import JaggedColumn
from fs_data.parquet import ParquetUIHDataset

DAY = datetime.datetime(2026, 1, 1)

# name: (type, its values): few of each, so that row groups often hold one alone, and terms meet bounds
TESTED: dict[str, tuple[Any, list[Any]]] = {
    "int": (pa.int64(), [-(2**53) - 1, 0, 1, 2]),
    "byte": (pa.uint8(), [0, 1, 200]),
    "unsigned": (pa.uint32(), [0, 1, 2**31, 2**32 - 1]),
    "float": (pa.float64(), [float("nan"), -0.0, 0.0, 0.5, float("inf")]),
    "single": (pa.float32(), [float("nan"), 0.0, 0.1, 1.0]),
    "bool": (pa.bool_(), [False, True]),
    "text": (pa.string(), ["", "a", "b", "é"]),
    "label": (pa.dictionary(pa.int32(), pa.string()), ["a", "b"]),
    "decimal": (pa.decimal128(9, 2), [Decimal("-1.50"), Decimal("0.00"), Decimal("2.25")]),
    "time": (pa.timestamp("us"), [DAY, DAY + datetime.timedelta(microseconds=1), DAY + datetime.timedelta(days=1)]),
    "nanos": (pa.timestamp("ns"), [DAY, DAY + datetime.timedelta(days=1)]),
    "date": (pa.date32(), [DAY.date(), DAY.date() + datetime.timedelta(days=1)]),
}

COMPARE = {"=": eq, "!=": ne, "<": lt, "<=": le, ">": gt, ">=": ge}


@st.composite
def tables(draw: st.DrawFn) -> list[tuple[pa.Table, int]]:
    """Tables with one schema, each with the size of its row groups; `user` counts all their rows."""
    names = draw(st.lists(st.sampled_from(sorted(TESTED)), min_size=1, max_size=3, unique=True))
    found: list[tuple[pa.Table, int]] = []
    first = 0
    for num_rows in draw(st.lists(st.integers(0, 12), min_size=1, max_size=3)):
        columns = {"user": pa.array(range(first, first + num_rows), pa.int64())}
        lengths = draw(st.lists(st.integers(0, 3), min_size=num_rows, max_size=num_rows))
        columns["history"] = pa.array([[first + i] * n for i, n in enumerate(lengths)], pa.list_(pa.int32()))
        for name in names:
            kind, values = TESTED[name]
            cells = draw(st.lists(st.sampled_from([None, *values]), min_size=num_rows, max_size=num_rows))
            plain = kind.value_type if pa.types.is_dictionary(kind) else kind
            array = pa.array(cells, plain)
            columns[name] = array.dictionary_encode().cast(kind) if plain is not kind else array
        found.append((pa.table(columns), draw(st.integers(1, 6))))
        first += num_rows
    return found


@st.composite
def terms(draw: st.DrawFn, names: list[str]) -> tuple[str, str, Any]:
    name = draw(st.sampled_from(names))
    value = st.sampled_from(TESTED[name][1])
    if draw(st.booleans()):
        return name, draw(st.sampled_from(sorted(COMPARE))), draw(value)
    values = draw(st.lists(value | st.none(), max_size=3))
    return name, draw(st.sampled_from(["in", "not in"])), values


def rows_of(batch: dict[str, Any]) -> list[tuple[int, list[int]]]:
    history = batch["history"]
    assert isinstance(history, JaggedColumn)
    parts = history.values.split(history.lengths.tolist())
    return [(user, part.tolist()) for user, part in zip(batch["user"].tolist(), parts, strict=True)]


def holds(cell: Any, operator: str, value: Any) -> bool:
    """What docs/parquet.md says of a term, for one row."""
    if operator.endswith("in"):
        is_in = any(cell is v or cell == v or (cell != cell and v != v) for v in value)
        return is_in == (operator == "in")
    return cell is not None and COMPARE[operator](cell, value)


def expected(table: pa.Table, where: Any) -> list[tuple[int, list[int]]]:
    rows = table.to_pylist()
    kept = [r for r in rows if not where or any(all(holds(r[n], op, v) for n, op, v in part) for part in where)]
    return [(r["user"], r["history"]) for r in kept]


def written(folder: Path, files: list[tuple[pa.Table, int]]) -> pa.Table:
    folder.mkdir(exist_ok=True)
    for i, (table, group) in enumerate(files):
        pq.write_table(table, folder / f"{i}.parquet", row_group_size=group)
    return pa.concat_tables([table for table, _ in files])


def batches_and_rests(make: Any) -> Iterator[tuple[list[Any], list[Any]]]:
    """All batches, and those that a fresh dataset gives after each one's state."""
    dataset, batches, states = make(), [], [make().state_dict()]
    for batch in dataset:
        batches.append(rows_of(batch))
        states.append(dataset.state_dict())
    for done, state in enumerate(states):
        fresh = make()
        fresh.load_state_dict(state)
        yield batches, [*batches[:done], *map(rows_of, fresh)]


@settings(max_examples=30)
@given(st.data())
def test_rows_are_those_of_a_naive_reading_and_resume_anywhere(data: st.DataObject) -> None:
    files = data.draw(tables())
    names = files[0][0].column_names[2:]
    parts = data.draw(st.none() | st.lists(st.lists(terms(names), min_size=1, max_size=2), min_size=1, max_size=2))
    size, world = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 3))
    ahead, shuffle = data.draw(st.sampled_from([0, 1 << 20])), data.draw(st.booleans())
    with tempfile.TemporaryDirectory() as folder:
        table = written(Path(folder), files)
        found: list[Any] = []
        for rank in range(world):

            def make(rank: int = rank) -> ParquetUIHDataset:
                return ParquetUIHDataset(
                    folder, columns=["user", "history"], batch_size=size, where=parts, shuffle=shuffle, rank=rank,
                    world_size=world, prefetch_bytes=ahead,
                )  # fmt: skip

            batches: list[Any] = []
            for batches, resumed in batches_and_rests(make):
                assert resumed == batches
                assert all(len(b) == size for b in batches[:-1])
            read = [row for batch in batches for row in batch]
            assert shuffle or read == sorted(read)
            found += read
    assert sorted(found) == expected(table, parts)
