"""Interaction logs become histories: all items, in order, the last two held out."""

import os
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from fs_data.build import build_histories


def rows(path: Path) -> list[dict[str, object]]:
    return pq.read_table(path).to_pylist()


def test_lines_in_order_become_histories(tmp_path: Path) -> None:
    log, out = tmp_path / "log.txt", tmp_path / "h.parquet"
    log.write_text("2 7\n1 5\n1 6\n1 4\n2 7\n1 5\n")
    assert build_histories(log, out) == 2
    assert rows(out) == [
        {"user": 1, "history": [5, 6], "validation": 4, "test": 5},
        {"user": 2, "history": [7, 7], "validation": 0, "test": 0},
    ]
    build_histories(log, out, split="none")
    assert rows(out) == [{"user": 1, "history": [5, 6, 4, 5]}, {"user": 2, "history": [7, 7]}]


@pytest.mark.parametrize("form", ["csv", "parquet"])
def test_times_order_a_users_items(tmp_path: Path, form: str) -> None:
    table = pa.table({"uid": [1, 1, 1, 1], "iid": [30, 10, 20, 21], "ts": [3.0, 1.0, 2.0, 2.0]})
    log, out = tmp_path / f"log.{form}", tmp_path / "h.parquet"
    if form == "csv":
        log.write_text("uid,iid,ts\n" + "".join(f"{u},{i},{t}\n" for u, i, t in zip(*table.to_pydict().values())))  # noqa: B905
    else:
        pq.write_table(table, log)
    build_histories(log, out, user="uid", item="iid", time="ts", split="none")
    assert rows(out) == [{"user": 1, "history": [10, 20, 21, 30]}]


def test_names_of_files_and_columns_are_no_patterns(tmp_path: Path) -> None:
    (tmp_path / "log[1].csv").write_text('us"er,item\n1,2\n')
    (tmp_path / "log1.csv").write_text('us"er,item\n5,6\n')
    out = tmp_path / "o[1]'s.parquet"
    assert build_histories(tmp_path / "log[1].csv", out, user='us"er', split="none") == 1
    assert rows(out) == [{"user": 1, "history": [2]}]


def test_wrong_logs_are_named(tmp_path: Path) -> None:
    out = tmp_path / "h.parquet"
    with pytest.raises(FileNotFoundError, match="nothing at"):
        build_histories(tmp_path / "none.csv", out)
    log = tmp_path / "log.csv"
    log.write_text("user,item\n1,2\n")
    with pytest.raises(ValueError, match=r"must have the columns \['when'\], it has \['user', 'item'\]"):
        build_histories(log, out, time="when")
    log.write_text("user,item\n1,a\n")
    with pytest.raises(ValueError, match="column 'item' must hold integers, got VARCHAR"):
        build_histories(log, out)
    log.write_text("user,item\n1,0\n")
    with pytest.raises(ValueError, match="items must be 1 or more"):
        build_histories(log, out)


@pytest.mark.parametrize(("lines", "lacking"), [(["1,,3", ",2,4", "1,2,"], 3), (["1,,3", "2,,4"], 2)])
def test_interactions_that_lack_a_value_are_counted(tmp_path: Path, lines: list[str], lacking: int) -> None:
    log = tmp_path / "LOG.CSV"
    log.write_text("\n".join(["user,item,at", "1,2,3", *lines, ""]))
    with pytest.raises(ValueError, match=rf"must have user, item and time, {lacking} of {len(lines) + 1} in .* lack"):
        build_histories(log, tmp_path / "h.parquet", time="at")
    table = pa.table({"user": [1, 2], "item": pa.array([None, None], pa.int64())})
    pq.write_table(table, tmp_path / "log.parquet")
    with pytest.raises(ValueError, match="must have user and item, 2 of 2 in"):
        build_histories(tmp_path / "log.parquet", tmp_path / "h.parquet")


def test_a_real_log_gives_its_histories(tmp_path: Path) -> None:
    folder = os.environ.get("GAMES_DATA")
    if not folder:
        pytest.skip("needs GAMES_DATA, a folder with interactions.txt")
    assert build_histories(Path(folder, "interactions.txt"), tmp_path / "h.parquet", split="none") == 31_013
    lengths = np.diff(pq.read_table(tmp_path / "h.parquet")["history"].combine_chunks().offsets.to_numpy())
    assert (lengths.min(), np.median(lengths), lengths.max(), lengths.sum()) == (1, 6, 860, 287_107)
