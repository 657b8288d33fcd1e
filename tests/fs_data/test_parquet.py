"""Histories from parquet: every row once, resumed to the row, whatever the groups; faults named with their place."""

import json
from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torchdata.stateful_dataloader import StatefulDataLoader

from fs_data import JaggedColumn
from fs_data.parquet import ParquetError, ParquetUIHDataset
from fs_data.parquet.deal import Piece, deal

Row = tuple[int, tuple[int, ...], float]


def write(path: Path, groups: Sequence[int], *, first: int = 0) -> list[Row]:
    """Groups of these sizes; row n has the history n, n + 1, … of length n % 4."""
    schema = pa.schema([("user", pa.int64()), ("history", pa.list_(pa.int64())), ("label", pa.float32())])
    rows: list[Row] = []
    with pq.ParquetWriter(path, schema) as writer:
        for size in groups:
            some = [(n, tuple(range(n, n + n % 4)), n / 2) for n in range(first + len(rows), first + len(rows) + size)]
            columns = [pa.array(list(c), t) for c, t in zip(zip(*some, strict=True), schema.types, strict=True)]
            writer.write_table(pa.table(columns, schema=schema), row_group_size=size)
            rows += some
    return rows


def rows_of(batch: dict[str, torch.Tensor | JaggedColumn]) -> list[Row]:
    user, history, label = batch["user"], batch["history"], batch["label"]
    assert isinstance(history, JaggedColumn)
    parts = history.values.split(history.lengths.tolist())
    return [(int(u), tuple(h.tolist()), float(x)) for u, h, x in zip(user, parts, label, strict=True)]


@given(st.lists(st.integers(0, 40), min_size=1, max_size=12), st.integers(1, 6), st.integers(1, 8))
def test_every_row_is_dealt_once_and_readers_end_together(groups: list[int], readers: int, spread: int) -> None:
    hands = deal([Piece(g, 0, n) for g, n in enumerate(groups)], readers, spread=spread)
    dealt = sorted((p.group, r) for hand in hands for p in hand for r in range(p.start, p.stop))
    assert dealt == [(g, r) for g, n in enumerate(groups) for r in range(n)]
    totals = [sum(map(len, hand)) for hand in hands]
    assert max(totals) - min(totals) <= spread
    assert hands == [sorted(hand) for hand in hands]  # in the files' order, cut groups too


def test_equal_groups_go_round_and_stay_whole() -> None:
    hands = deal([Piece(g, 0, 10) for g in range(6)], 3, spread=4)
    assert [[p.group for p in hand] for hand in hands] == [[0, 3], [1, 4], [2, 5]]


def test_batches_run_across_groups(tmp_path: Path) -> None:
    rows = write(tmp_path / "h.parquet", [7, 3])
    batches = [rows_of(b) for b in ParquetUIHDataset(tmp_path, batch_size=4)]
    assert [len(b) for b in batches] == [4, 4, 2]
    assert [row for b in batches for row in b] == rows


def test_one_group_feeds_four_ranks(tmp_path: Path) -> None:
    rows = write(tmp_path / "h.parquet", [17])
    found = [
        [r for b in ParquetUIHDataset(tmp_path, batch_size=2, rank=rank, world_size=4) for r in rows_of(b)]
        for rank in range(4)
    ]
    assert sorted(map(len, found)) == [4, 4, 4, 5]
    assert sorted(r for part in found for r in part) == rows


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_restart_goes_on_after_every_batch(tmp_path: Path, num_workers: int, shuffle: bool) -> None:
    rows = write(tmp_path / "h.parquet", [7, 3, 5, 1, 9])
    context = "forkserver" if num_workers else None

    def make() -> StatefulDataLoader:
        dataset = ParquetUIHDataset(tmp_path, batch_size=4, shuffle=shuffle)
        return StatefulDataLoader(
            dataset, batch_size=None, num_workers=num_workers, multiprocessing_context=context, snapshot_every_n_steps=1
        )

    loader, saved, batches = make(), [], []
    for batch in loader:
        batches.append(rows_of(batch))
        saved.append(loader.state_dict())
    assert sorted(r for b in batches for r in b) == rows
    for done in (1, 3, len(saved) - 1) if num_workers else range(1, len(saved) + 1):
        fresh = make()
        fresh.load_state_dict(saved[done - 1])
        assert [rows_of(b) for b in fresh] == batches[done:], done


def test_the_state_is_text_and_the_dataset_resumes_alone(tmp_path: Path) -> None:
    write(tmp_path / "h.parquet", [7, 3, 5])
    dataset = ParquetUIHDataset(tmp_path, batch_size=4)
    iterator = iter(dataset)
    next(iterator)
    state = json.loads(json.dumps(dataset.state_dict()))
    rest = [rows_of(b) for b in iterator]
    fresh = ParquetUIHDataset(tmp_path, batch_size=4)
    fresh.load_state_dict(state)
    fresh.set_epoch(0)
    assert [rows_of(b) for b in fresh] == rest
    assert len([rows_of(b) for b in fresh]) == 4  # the next pass is a whole one


def test_epochs_have_other_orders_and_the_same_rows(tmp_path: Path) -> None:
    rows = write(tmp_path / "h.parquet", [7, 3, 5])
    dataset = ParquetUIHDataset(tmp_path, batch_size=4, shuffle=True)
    orders = []
    for epoch in (0, 1, 0):
        dataset.set_epoch(epoch)
        orders.append([r for b in dataset for r in rows_of(b)])
    assert orders[0] == orders[2] != orders[1]
    assert sorted(orders[1]) == rows


def test_the_newest_items_are_kept(tmp_path: Path) -> None:
    rows = write(tmp_path / "h.parquet", [9])
    (batch,) = ParquetUIHDataset(tmp_path, batch_size=9, max_uih=2)
    assert rows_of(batch) == [(u, h[-2:], x) for u, h, x in rows]


def test_a_whole_group_is_read_without_copying(tmp_path: Path) -> None:
    write(tmp_path / "h.parquet", [8])
    (batch,) = ParquetUIHDataset(tmp_path, batch_size=8, columns=["history"])
    assert list(batch) == ["history"]
    values = batch["history"].values
    first, second = (b["history"].values for b in ParquetUIHDataset(tmp_path, batch_size=4, columns=["history"]))
    assert first.untyped_storage().data_ptr() <= second.data_ptr()
    assert torch.equal(torch.cat([first, second]), values)


def test_an_empty_reader_yields_nothing(tmp_path: Path) -> None:
    write(tmp_path / "h.parquet", [1])
    assert [len(list(ParquetUIHDataset(tmp_path, batch_size=2, rank=r, world_size=2))) for r in range(2)] == [1, 0]


def test_all_empty_histories_are_int64_of_size_zero(tmp_path: Path) -> None:
    pq.write_table(pa.table({"history": pa.array([[], []], pa.list_(pa.int64()))}), tmp_path / "h.parquet")
    (batch,) = ParquetUIHDataset(tmp_path, batch_size=2)
    assert batch["history"].values.dtype == torch.int64
    assert batch["history"].offsets.tolist() == [0, 0, 0]


def read_all(path: Path, **options: object) -> None:
    list(ParquetUIHDataset(path, batch_size=2, **options))


def test_faults_name_their_place(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"nothing found at .*nowhere"):
        read_all(tmp_path / "nowhere.parquet")
    file = tmp_path / "h.parquet"
    write(file, [3])
    with pytest.raises(ParquetError, match=r"h.parquet must have the columns \['age'\], it has \['user', 'history'"):
        read_all(file, columns=["age"])
    pq.write_table(pa.table({"history": pa.array([[1], None], pa.list_(pa.int64()))}), file)
    with pytest.raises(ParquetError, match=r"h\.parquet, row group 0, column 'history', row 1: must not be null"):
        read_all(file)
    pq.write_table(pa.table({"history": pa.array([[1], [2, None]], pa.list_(pa.int64()))}), file)
    with pytest.raises(ParquetError, match="column 'history', row 1: must not hold a null element"):
        read_all(file)
    pq.write_table(pa.table({"name": ["a"]}), file)
    with pytest.raises(ParquetError, match="column 'name': texts need a vocabulary"):
        read_all(file)
    file.write_bytes(file.read_bytes()[:-20])
    with pytest.raises(ParquetError, match=r"h\.parquet must be a complete parquet file"):
        read_all(file)


def test_a_state_for_other_files_or_readers_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "h.parquet", [3])
    state = ParquetUIHDataset(tmp_path, batch_size=2).state_dict()
    with pytest.raises(ParquetError, match="for the same reader"):
        ParquetUIHDataset(tmp_path, batch_size=2, rank=0, world_size=2).load_state_dict(state)
    write(tmp_path / "h.parquet", [4])
    with pytest.raises(ParquetError, match="for the same files"):
        ParquetUIHDataset(tmp_path, batch_size=2).load_state_dict(state)
