"""Broken, changed and foreign files: an error that names the place, or skipped and counted."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from fs_data.parquet import ParquetError, ParquetUIHDataset
from tests.fs_data.test_parquet import write


def users(dataset: ParquetUIHDataset) -> list[int]:
    return [n for batch in dataset for n in batch["user"].tolist()]


def corrupt_group(path: Path, group: int) -> None:
    """Overwrites the first page of the group's column `user`."""
    chunk = pq.read_metadata(path).row_group(group).column(0)
    start = min(o for o in (chunk.dictionary_page_offset, chunk.data_page_offset) if o is not None)
    data = bytearray(path.read_bytes())
    data[start : start + chunk.total_compressed_size] = b"\xff" * chunk.total_compressed_size
    path.write_bytes(data)


def make(path: Path, **options: Any) -> ParquetUIHDataset:
    return ParquetUIHDataset(path, batch_size=4, **options)


@pytest.mark.parametrize("prefetch_bytes", [0, 1 << 20])
def test_a_corrupt_page_names_its_group_or_the_group_is_skipped(tmp_path: Path, prefetch_bytes: int) -> None:
    write(tmp_path / "h.parquet", [3, 5, 2])
    corrupt_group(tmp_path / "h.parquet", 1)
    with pytest.raises(ParquetError, match=r"h\.parquet, row group 1 must hold intact pages"):
        users(make(tmp_path, prefetch_bytes=prefetch_bytes))
    dataset = make(tmp_path, on_error="skip", prefetch_bytes=prefetch_bytes)
    assert users(dataset) == [0, 1, 2, 8, 9]
    assert (dataset.stats().groups_skipped, dataset.stats().rows_skipped) == (1, 5)


def test_resume_passes_over_skipped_rows(tmp_path: Path) -> None:
    write(tmp_path / "h.parquet", [3, 5, 9])
    corrupt_group(tmp_path / "h.parquet", 1)

    def fresh() -> ParquetUIHDataset:
        return ParquetUIHDataset(tmp_path, batch_size=2, on_error="skip")

    dataset, states, batches = fresh(), [], []
    for batch in dataset:
        batches.append(batch["user"].tolist())
        states.append(dataset.state_dict())
    assert batches == [[0, 1], [2, 8], [9, 10], [11, 12], [13, 14], [15, 16]]
    for done, state in enumerate(states, start=1):
        again = fresh()
        again.load_state_dict(state)
        assert [b["user"].tolist() for b in again] == batches[done:]


@pytest.mark.parametrize("fault", ["truncated", "no parquet", "missing column", "wrong type", "empty"])
def test_a_file_that_does_not_fit_is_named_or_skipped(tmp_path: Path, fault: str) -> None:
    rows = write(tmp_path / "a.parquet", [4])
    bad = tmp_path / "b.parquet"
    write(bad, [4])
    if fault == "truncated":
        bad.write_bytes(bad.read_bytes()[:-30])
    elif fault == "no parquet":
        bad.write_text("user,history\n" * 10)
    elif fault == "empty":
        bad.write_bytes(b"")
    else:
        table = pq.read_table(bad)
        table = table.drop_columns(["label"]) if fault == "missing column" else table.set_column(
            0, "user", table["user"].cast(pa.int32())
        )  # fmt: skip
        pq.write_table(table, bad)
    with pytest.raises(ParquetError, match=r"b\.parquet.* must (be|have)"):
        make(tmp_path)
    dataset = make(tmp_path, on_error="skip")
    assert users(dataset) == [user for user, _, _ in rows]
    assert dataset.stats().files_skipped == 1
    (tmp_path / "a.parquet").unlink()
    if fault in ("truncated", "no parquet", "empty"):
        with pytest.raises(ParquetError, match="at least one file must be readable"):
            make(tmp_path, on_error="skip")


def test_a_file_without_rows_is_an_ordinary_file(tmp_path: Path) -> None:
    write(tmp_path / "a.parquet", [])
    rows = write(tmp_path / "b.parquet", [5])
    assert users(make(tmp_path)) == [user for user, _, _ in rows]
    (tmp_path / "b.parquet").unlink()
    assert users(make(tmp_path)) == []


def test_a_file_that_changes_between_epochs_is_named(tmp_path: Path) -> None:
    write(tmp_path / "h.parquet", [4, 4])
    dataset = make(tmp_path)
    users(dataset)
    state = dataset.state_dict()
    write(tmp_path / "h.parquet", [4, 4], first=1)  # as many rows and groups as before
    with pytest.raises(ParquetError, match=r"h\.parquet must stay as it was"):
        users(dataset)
    with pytest.raises(ParquetError, match=r"same files: .*h\.parquet has changed since"):
        make(tmp_path).load_state_dict(state)


def test_a_file_that_vanishes_is_named_or_skipped(tmp_path: Path) -> None:
    write(tmp_path / "a.parquet", [4])
    write(tmp_path / "b.parquet", [4], first=4)
    for on_error in ("raise", "skip"):
        dataset = make(tmp_path, on_error=on_error)
        (tmp_path / "b.parquet").rename(tmp_path / "gone")
        if on_error == "raise":
            with pytest.raises(FileNotFoundError, match=r"b\.parquet"):
                users(dataset)
        else:
            assert users(dataset) == [0, 1, 2, 3]
            assert dataset.stats().groups_skipped == 1
        (tmp_path / "gone").rename(tmp_path / "b.parquet")


def test_predicates_leave_out_groups_by_their_footers_and_rows_by_their_values(tmp_path: Path) -> None:
    write(tmp_path / "h.parquet", [10, 10, 10])
    dataset = make(tmp_path, where=[("user", ">=", 15), ("label", "<", 12)], columns=["user"])
    assert dataset.num_rows == 20  # the first group's footer says that it holds none
    assert users(dataset) == list(range(15, 24))
    either = [[("user", "<", 3)], [("user", "in", [27, 29])]]
    assert users(make(tmp_path, where=either)) == [0, 1, 2, 27, 29]
    assert users(make(tmp_path, where=[("user", ">", 99)])) == []


def test_resume_under_a_predicate_is_exact(tmp_path: Path) -> None:
    write(tmp_path / "h.parquet", [7, 9, 14])

    def fresh() -> ParquetUIHDataset:
        return ParquetUIHDataset(tmp_path, batch_size=2, where=[("user", "not in", [3, 4, 5, 16])], shuffle=True)

    dataset, states, batches = fresh(), [], []
    for batch in dataset:
        batches.append(batch["user"].tolist())
        states.append(dataset.state_dict())
    assert sorted(n for b in batches for n in b) == sorted(set(range(30)) - {3, 4, 5, 16})
    for done, state in enumerate(states, start=1):
        again = fresh()
        again.load_state_dict(state)
        assert [b["user"].tolist() for b in again] == batches[done:]


def test_hive_partitions_are_columns_and_prune_files(tmp_path: Path) -> None:
    for day, country in ((1, "DE"), (2, "DE"), (2, "US")):
        folder = tmp_path / f"day={day}" / f"country={country}"
        folder.mkdir(parents=True)
        write(folder / "part.parquet", [3], first=100 * day + (10 if country == "US" else 0))
    (tmp_path / "day=2" / "_SUCCESS").touch()
    (tmp_path / "day=2" / "_temporary").mkdir()
    (tmp_path / "day=2" / "_temporary" / "half.parquet").write_bytes(b"half")
    (batch,) = ParquetUIHDataset(tmp_path, batch_size=9, columns=["user", "day"])
    assert batch["day"].tolist() == [1] * 3 + [2] * 6
    (batch,) = ParquetUIHDataset(tmp_path, batch_size=9, where=[("day", "==", 2), ("country", "==", "US")])
    assert batch["user"].tolist() == [210, 211, 212]
    assert list(batch) == ["user", "history", "label", "day"]
    (tmp_path / "day=1" / "country=DE" / "part.parquet").write_bytes(b"broken")
    assert len(users(make(tmp_path, where=[("day", ">", 1)]))) == 6  # the other folder is not even opened
    assert len(users(make(tmp_path / "day=2" / "**" / "*.parquet"))) == 6


@pytest.mark.parametrize("names", [("²", "3"), ("3", str(2**63)), ("-", "3"), ("3", "٣")])
def test_folders_that_are_no_int64_are_texts(tmp_path: Path, names: tuple[str, str]) -> None:
    for i, name in enumerate(names):
        (tmp_path / f"k={name}").mkdir()
        write(tmp_path / f"k={name}" / "h.parquet", [2], first=10 * i)
    assert len(users(make(tmp_path))) == 4
    assert users(make(tmp_path, where=[("k", "=", names[1])])) == [10, 11]


def test_urls_and_globs_of_local_files(tmp_path: Path) -> None:
    for i, name in enumerate(["a", "b", "x y", "c^"]):
        (tmp_path / name).mkdir()
        write(tmp_path / name / "h.parquet", [1], first=i)
    for pattern, found in {
        "x y/h.parquet": [2], "x%20y": [2], "[ab]/*.parquet": [0, 1], "[!a]/h.parquet": [1], "?/h.parquet": [0, 1],
        "c[^]": [3],
    }.items():  # fmt: skip
        assert users(make(f"file://{tmp_path}/{pattern}")) == found
        assert pattern == "x%20y" or users(make(tmp_path / pattern)) == found
    assert users(make(f"file://localhost{tmp_path}/a")) == [0]
    with pytest.raises(ValueError, match=r"must have an absolute path, file:///…, got file://data/h"):
        make("file://data/h.parquet")


def test_a_folder_and_a_column_of_one_name_must_agree(tmp_path: Path) -> None:
    folder = tmp_path / "user=7"
    folder.mkdir()
    pq.write_table(pa.table({"user": [7, 7], "label": [1, 2]}), folder / "h.parquet")
    assert users(make(tmp_path, where=[("user", "=", 7)])) == [7, 7]
    write(folder / "h.parquet", [3], first=7)
    (batch,) = make(tmp_path, columns=["label"])
    assert batch["label"].tolist() == [3.5, 4, 4.5]
    with pytest.raises(ParquetError, match=r"h\.parquet, row group 0, column 'user': must hold 7 alone"):
        make(tmp_path)


def test_columns_whose_names_have_dots_keep_their_own_bounds(tmp_path: Path) -> None:
    table = pa.table({"user": [1, 2, 3, 4], "user.id": [11, 12, 13, 14]})
    pq.write_table(table, tmp_path / "h.parquet", row_group_size=2)
    dataset = make(tmp_path, where=[("user", ">=", 3), ("user.id", "<", 14)])
    assert (dataset.num_rows, users(dataset)) == (2, [3])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"source": []}, "source must name at least one file"),
        ({"source": {}}, "quotas must be more than 0"),
        ({"source": {"h.parquet": float("nan")}}, "quotas must be more than 0 and finite"),
        ({"columns": []}, "columns must be a list of at least one name"),
        ({"columns": "history"}, "columns must be a list of at least one name, each once, got 'history'"),
        ({"columns": ["user", "user"]}, "columns must be a list of at least one name, each once"),
        ({"batch_size": 2.5}, "batch_size must be a whole number, got 2.5"),
        ({"max_uih": 0}, "max_uih must be at least 1, got 0"),
        ({"seed": -1}, "seed must be at least 0, got -1"),
        ({"timeout_s": float("nan")}, "timeout_s more, got 0.5 and nan"),
        ({"rank": 2, "world_size": 2}, "rank must be from 0 to world_size - 1, got 2 of 2"),
        ({"vocabularies": {"c": {"a", "b"}}}, "vocabularies must give 'c' a list"),
        ({"vocabularies": {"c": ["a", 1]}}, "vocabularies must give 'c' texts, got 1"),
    ],
)
def test_arguments_that_cannot_be_are_refused(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    write(tmp_path / "h.parquet", [3])
    with pytest.raises(ValueError, match=message):
        ParquetUIHDataset(**{"source": tmp_path, "batch_size": 2, **options})


def test_a_file_with_two_columns_of_one_name_is_refused(tmp_path: Path) -> None:
    pq.write_table(pa.table([pa.array([1]), pa.array([2])], names=["user", "user"]), tmp_path / "h.parquet")
    with pytest.raises(ParquetError, match=r"h\.parquet must have each column once, it has several \['user'\]"):
        make(tmp_path)


def test_mixed_sources_must_have_the_same_types(tmp_path: Path) -> None:
    files = {str(tmp_path / name): 1.0 for name in ("a", "b")}
    pq.write_table(pa.table({"user": [1], "history": pa.array([[1]], pa.list_(pa.int32()))}), tmp_path / "a")
    pq.write_table(pa.table({"user": [2], "history": [[]]}), tmp_path / "b")  # of no type
    assert [b["history"].values.dtype for b in ParquetUIHDataset(files, batch_size=1)] == [torch.int32] * 2
    pq.write_table(pa.table({"user": [2], "history": [[1]]}), tmp_path / "b")
    with pytest.raises(ParquetError, match=r"b, column 'history': must be list<.*int32> as in the files before"):
        ParquetUIHDataset(files, batch_size=1)


def test_a_source_without_matching_files_leaves_the_columns_to_the_others(tmp_path: Path) -> None:
    for source, day in (("recent", 1), ("old", 2)):
        (tmp_path / source / f"day={day}").mkdir(parents=True)
        write(tmp_path / source / f"day={day}" / "h.parquet", [3])
    sources = {str(tmp_path / name): 1.0 for name in ("recent", "old")}
    (batch,) = ParquetUIHDataset(sources, batch_size=4, where=[("day", "=", 2)])
    assert list(batch) == ["user", "history", "label", "day"]


def test_memory_ahead_of_the_consumer_is_bounded() -> None:
    from fs_data.parquet.ahead import read_ahead

    alive = peak = 0

    def read(size: int) -> int:
        nonlocal alive, peak
        alive += size
        peak = max(peak, alive)
        return size

    for size in read_ahead(
        [3, 4, 2, 9, 20, 1, 1, 5] * 5, read, lambda s: s, lambda s: 3 * s, max_bytes=10, timeout_s=60
    ):
        alive -= size
    assert 10 < peak <= 20 + 1  # 20 is larger than the bound, and read alone


def test_columns_that_are_converted_count_as_what_that_takes(tmp_path: Path) -> None:
    texts = [f"https://example.org/items/{i:020d}" for i in range(100)]
    items = np.random.default_rng(0).integers(0, 100, 40_000)
    offsets = np.arange(0, 40_001, 4_000, np.int32)
    for name, values in {
        "texts": pa.array(texts).take(pa.array(items)),  # 35 kB in the file, each text once
        "decimals": pa.array(items).cast(pa.decimal128(19, 0)).cast(pa.decimal128(30, 2)),
        "few": pa.array(items).cast(pa.int16()),
        "flags": pa.array(items > 50),
    }.items():
        table = pa.table({"history": pa.ListArray.from_arrays(offsets, values)})
        pq.write_table(table, tmp_path / f"{name}.parquet")
    script = (
        "import sys, pyarrow\n"
        "from fs_data.parquet import ParquetUIHDataset\n"
        "texts = [f'https://example.org/items/{i:020d}' for i in range(100)]\n"
        "for name in ('flags', 'few', 'decimals', 'texts'):\n"  # the peak grows
        "    file = f'{sys.argv[1]}/{name}.parquet'\n"
        "    dataset = ParquetUIHDataset(file, batch_size=10, vocabularies={'history': texts}, prefetch_bytes=0)\n"
        "    (batch,), (group,) = dataset, dataset.footers[0].groups\n"
        "    peak = pyarrow.default_memory_pool().max_memory()\n"
        "    print(name, batch['history'].values.nbytes <= group.num_bytes, peak <= group.decoding_bytes)\n"
        "    del batch"
    )
    done = subprocess.run([sys.executable, "-c", script, tmp_path], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [f"{name} True True" for name in ("flags", "few", "decimals", "texts")]


def test_arrow_memory_stays_within_the_bound_and_uses_it(tmp_path: Path) -> None:
    rows_a_group, items = 8, 20_000  # 1.28 MB a group
    schema = pa.schema([("history", pa.list_(pa.int64()))])
    with pq.ParquetWriter(tmp_path / "h.parquet", schema, use_dictionary=False) as writer:
        for group in range(24):
            ids = np.random.default_rng(group).integers(0, 1 << 48, rows_a_group * items)
            offsets = np.arange(rows_a_group + 1, dtype=np.int32) * items
            table = pa.table([pa.ListArray.from_arrays(pa.array(offsets), pa.array(ids))], schema=schema)
            writer.write_table(table, row_group_size=rows_a_group)
    bound = 12 << 20
    script = (
        "import sys, time, pyarrow\n"
        "from fs_data.parquet import ParquetUIHDataset\n"
        f"for _ in ParquetUIHDataset(sys.argv[1], batch_size=3, prefetch_bytes={bound}):\n"
        "    time.sleep(0.005)\n"
        "print(pyarrow.default_memory_pool().max_memory())"
    )
    done = subprocess.run([sys.executable, "-c", script, tmp_path], capture_output=True, text=True, check=True)
    assert bound / 2 < int(done.stdout) <= bound
    # What the bound goes by, whoever is slow: one group, decoded when nothing else is held.
    (group, *_) = ParquetUIHDataset(tmp_path, batch_size=3).footers[0].groups
    script = script.replace("for _ in", "for _, _ in zip(range(1),").replace(f"{bound})", "0))")
    done = subprocess.run([sys.executable, "-c", script, tmp_path], capture_output=True, text=True, check=True)
    assert 0.9 * group.decoding_bytes < int(done.stdout) <= group.decoding_bytes
