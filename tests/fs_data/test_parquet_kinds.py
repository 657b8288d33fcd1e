"""Every kind of column that histories come in: as tensors, cut anywhere, and with nulls found where they are."""

import datetime
import itertools
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from fs_data import JaggedColumn, NestedColumn
from fs_data.parquet import ParquetError, ParquetUIHDataset

EVENT = pa.struct([("item", pa.int64()), ("dwell", pa.float32())])
DAY = datetime.datetime(2026, 1, 1)

# name: (type, four rows, what a batch of them holds for each row by column)
KINDS: dict[str, tuple[Any, list[Any], dict[str, list[Any]]]] = {
    "int8": (pa.int8(), [1, -2, 3, 4], {"c": [1, -2, 3, 4]}),
    "int64": (pa.int64(), [2**62, -(2**53) - 1, 0, 1], {"c": [2**62, -(2**53) - 1, 0, 1]}),
    "half": (pa.float16(), [1.5, 2, 3, 4], {"c": [1.5, 2, 3, 4]}),
    "double": (pa.float64(), [1.5, 2, 3, 4], {"c": [1.5, 2, 3, 4]}),
    "bool": (pa.bool_(), [True, False, True, True], {"c": [True, False, True, True]}),
    "decimal": (pa.decimal128(9, 2), [Decimal("1.25"), Decimal("-3.50"), Decimal(0), Decimal(7)],
                {"c": [1.25, -3.5, 0, 7]}),
    "timestamp": (pa.timestamp("ms"), [DAY] * 4, {"c": [1767225600000] * 4}),
    "date": (pa.date32(), [DAY.date()] * 4, {"c": [20454] * 4}),
    "text": (pa.string(), ["DE", "US", "DE", "FR"], {"c": [0, 1, 0, 2]}),
    "dictionary": (pa.dictionary(pa.int32(), pa.string()), ["US", "US", "FR", "DE"], {"c": [1, 1, 2, 0]}),
    "numbers by dictionary": (pa.dictionary(pa.int8(), pa.int64()), [7, 9, 7, 7], {"c": [7, 9, 7, 7]}),
    "list": (pa.list_(pa.int64()), [[1, 2], [], [3], [4, 5, 6]], {"c": [[1, 2], [], [3], [4, 5, 6]]}),
    "large list": (pa.large_list(pa.int32()), [[1, 2], [], [3], [4]], {"c": [[1, 2], [], [3], [4]]}),
    "list of texts": (pa.list_(pa.string()), [["US"], [], ["DE", "FR"], []], {"c": [[1], [], [0, 2], []]}),
    "list of bools": (pa.list_(pa.bool_()), [[True], [], [False], []], {"c": [[True], [], [False], []]}),
    "fixed size": (pa.list_(pa.float32(), 2), [[1, 2], [3, 4], [5, 6], [7, 8]],
                   {"c": [[1, 2], [3, 4], [5, 6], [7, 8]]}),
    "list of fixed size": (pa.list_(pa.list_(pa.float32(), 2)), [[[1, 2]], [], [[3, 4], [5, 6]], []],
                           {"c": [[[1, 2]], [], [[3, 4], [5, 6]], []]}),
    "list of lists": (pa.list_(pa.list_(pa.int64())), [[[1], []], [], [[2, 3]], [[4], [5, 6]]],
                      {"c": [[[1], []], [], [[2, 3]], [[4], [5, 6]]]}),
    "struct": (EVENT, [{"item": n, "dwell": n / 2} for n in range(4)],
               {"c.item": [0, 1, 2, 3], "c.dwell": [0, 0.5, 1, 1.5]}),
    "list of structs": (pa.list_(EVENT), [[{"item": 1, "dwell": 0.5}], [], [{"item": 2, "dwell": 1}] * 2, []],
                        {"c.item": [[1], [], [2, 2], []], "c.dwell": [[0.5], [], [1, 1], []]}),
}  # fmt: skip
LISTS = [name for name, (kind, _, _) in KINDS.items() if pa.types.is_list(kind) or pa.types.is_large_list(kind)]


def write(path: Path, kind: Any, values: list[Any], group: int = 4) -> None:
    if pa.types.is_dictionary(kind):
        array = pa.array(values, kind.value_type).dictionary_encode().cast(kind)
    else:
        array = pa.array(values, kind)
    pq.write_table(pa.table({"c": array, "n": pa.array(range(len(values)), pa.int64())}), path, row_group_size=group)


def make(path: Path, **options: Any) -> ParquetUIHDataset:
    return ParquetUIHDataset(path, columns=["c"], vocabularies={"c": ["DE", "US", "FR"]}, **options)


def plain(column: Any) -> list[Any]:
    """Rows as Python lists."""
    if isinstance(column, NestedColumn):
        lists = plain(JaggedColumn(column.values, column.inner_offsets))
        at = column.outer_offsets.tolist()
        return [lists[a:b] for a, b in itertools.pairwise(at)]
    if isinstance(column, JaggedColumn):
        assert column.offsets.dtype == torch.int64
        return [part.tolist() for part in column.values.split(column.lengths.tolist())]
    return column.tolist()


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("batch_size", [1, 3, 4])
@pytest.mark.parametrize("group", [2, 4])
def test_values_arrive_whatever_the_cuts(tmp_path: Path, name: str, batch_size: int, group: int) -> None:
    kind, values, expected = KINDS[name]
    write(tmp_path / "h.parquet", kind, values, group)
    found: dict[str, list[Any]] = {}
    for batch in make(tmp_path, batch_size=batch_size):
        for out, column in batch.items():
            found.setdefault(out, []).extend(plain(column))
    assert found == expected


@pytest.mark.parametrize("name", KINDS)
def test_shuffled_rows_are_the_same_rows(tmp_path: Path, name: str) -> None:
    kind, values, expected = KINDS[name]
    write(tmp_path / "h.parquet", kind, values)
    options = {"vocabularies": {"c": ["DE", "US", "FR"]}, "shuffle": True, "seed": 3}
    (batch,) = ParquetUIHDataset(tmp_path, batch_size=4, **options)
    order = batch.pop("n").tolist()
    assert sorted(order) == [0, 1, 2, 3]
    for out, column in batch.items():
        assert plain(column) == [expected[out][n] for n in order]


@pytest.mark.parametrize("name", KINDS)
def test_a_null_is_an_error_with_its_row_or_skipped_and_counted(tmp_path: Path, name: str) -> None:
    kind, values, expected = KINDS[name]
    write(tmp_path / "h.parquet", kind, [*values[:2], None, values[3]])
    with pytest.raises(ParquetError, match=r"h\.parquet, row group 0, column 'c', row 2: must not be null"):
        list(make(tmp_path, batch_size=4))
    dataset = make(tmp_path, batch_size=4, on_error="skip")
    (batch,) = dataset
    assert {out: plain(c) for out, c in batch.items()} == {o: [*v[:2], v[3]] for o, v in expected.items()}
    assert dataset.stats().rows_skipped == 1


@pytest.mark.parametrize("name", LISTS)
def test_a_null_element_is_found_at_any_depth(tmp_path: Path, name: str) -> None:
    kind, values, _ = KINDS[name]
    write(tmp_path / "h.parquet", kind, [values[0], [*values[0], None], *values[2:]])
    with pytest.raises(ParquetError, match="column 'c', row 1: must not hold a null element"):
        list(make(tmp_path, batch_size=4))
    dataset = make(tmp_path, batch_size=4, on_error="skip")
    assert sum(len(next(iter(b.values()))) for b in dataset) == 3
    assert dataset.stats().rows_skipped == 1


def test_a_null_inside_an_inner_list_or_struct_is_found(tmp_path: Path) -> None:
    for kind, bad in ((pa.list_(pa.list_(pa.int64())), [[1], [2, None]]), (pa.list_(EVENT), [{"item": 1}])):
        write(tmp_path / "h.parquet", kind, [[], bad, []])
        with pytest.raises(ParquetError, match="row 1: must not hold a null element"):
            list(make(tmp_path, batch_size=4))


def test_large_ids_beside_a_skipped_null_stay_exact(tmp_path: Path) -> None:
    write(tmp_path / "h.parquet", pa.list_(pa.int64()), [[2**53 + 1], None, [2**62 + 3, None], [2**62 + 1]])
    (batch,) = make(tmp_path, batch_size=4, on_error="skip")
    assert plain(batch["c"]) == [[2**53 + 1], [2**62 + 1]]


def test_a_text_outside_the_vocabulary_is_an_error(tmp_path: Path) -> None:
    write(tmp_path / "h.parquet", pa.string(), ["DE", "XX"])
    with pytest.raises(ParquetError, match=r"row 1: must not hold 'XX', a text outside vocabularies\['c'\]; add it"):
        list(make(tmp_path, batch_size=2))


@pytest.mark.parametrize(("value", "what"), [("XX", r"'XX', a text outside vocabularies\['c.n'\]"), (None, "a null")])
def test_a_text_within_structs_is_named_with_its_field(tmp_path: Path, value: str | None, what: str) -> None:
    kind = pa.list_(pa.struct([("n", pa.dictionary(pa.int32(), pa.string()))]))
    rows = [[{"n": "US"}], [{"n": "DE"}, {"n": value}], [{"n": "YY"}]]
    table = pa.table({"c": pa.array(rows, pa.list_(pa.struct([("n", pa.string())]))).cast(kind)})
    pq.write_table(table, tmp_path / "h.parquet")
    dataset = ParquetUIHDataset(tmp_path, batch_size=2, vocabularies={"c.n": ["DE", "US"]})
    with pytest.raises(ParquetError, match=f"column 'c', row 1: must not hold {what}"):
        list(dataset)


def test_one_field_of_structs_is_read_alone_and_max_uih_keeps_the_newest(tmp_path: Path) -> None:
    rows = [[{"item": n, "dwell": 0.0} for n in range(k)] for k in (5, 1)]
    write(tmp_path / "h.parquet", pa.list_(EVENT), rows)
    (batch,) = ParquetUIHDataset(tmp_path, columns=["c.item"], batch_size=4, max_uih=2)
    assert {k: plain(v) for k, v in batch.items()} == {"c.item": [[3, 4], [0]]}
    write(tmp_path / "h.parquet", pa.list_(pa.list_(pa.int64())), [[[1], [2, 3], []], [[4]]])
    (batch,) = make(tmp_path, batch_size=4, max_uih=2)
    assert plain(batch["c"]) == [[[2, 3], []], [[4]]]


@pytest.mark.parametrize("empty_first", [True, False])
def test_a_file_of_empty_histories_takes_the_type_of_the_others(tmp_path: Path, empty_first: bool) -> None:
    names = ("a", "b") if empty_first else ("b", "a")
    pq.write_table(pa.table({"c": pa.array([[], []])}), tmp_path / f"{names[0]}.parquet")  # list<null>
    pq.write_table(pa.table({"c": pa.array([[1], [2]], pa.list_(pa.int32()))}), tmp_path / f"{names[1]}.parquet")
    (batch,) = make(tmp_path, batch_size=4)
    assert plain(batch["c"]) == ([[], [], [1], [2]] if empty_first else [[1], [2], [], []])
    assert batch["c"].values.dtype == torch.int32


def test_only_empty_histories_are_int64_of_size_zero(tmp_path: Path) -> None:
    pq.write_table(pa.table({"c": pa.array([[], []])}), tmp_path / "h.parquet")
    (batch,) = make(tmp_path, batch_size=4)
    assert (batch["c"].values.dtype, batch["c"].values.shape, len(batch["c"])) == (torch.int64, (0,), 2)


@pytest.mark.parametrize("kind", [pa.binary(), pa.list_(pa.list_(pa.list_(pa.int64())))])
def test_a_kind_without_a_tensor_is_refused_at_once(tmp_path: Path, kind: Any) -> None:
    write(tmp_path / "h.parquet", kind, [None])
    with pytest.raises(ParquetError, match=r"h\.parquet, column 'c': .*; or leave it out by columns="):
        make(tmp_path, batch_size=1)
