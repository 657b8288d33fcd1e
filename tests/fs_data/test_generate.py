"""Generated histories: the paper's lengths, items in range, something to learn, the same file from the same seed."""

from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from fs_data.generate import draw_lengths, write_histories


def test_lengths_are_the_papers() -> None:
    lengths = draw_lengths(np.random.default_rng(0), 100_000, max_length=21_000)
    assert (lengths > 2_000).mean() > 0.5  # a majority
    assert 0 < (lengths > 16_000).mean() < 0.1  # few
    assert lengths.max() == 21_000


def test_the_same_seed_gives_the_same_rows_and_another_does_not(tmp_path: Path) -> None:
    tables = []
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        write_histories(tmp_path / name, num_users=30, num_items=100, max_length=50, seed=seed, rows_per_group=7)
        tables.append(pq.read_table(tmp_path / name))
    assert tables[0].equals(tables[1])
    assert not tables[0].equals(tables[2])
    assert tables[0].num_rows == 30
    assert tables[0]["user"].to_pylist() == list(range(30))


def test_items_are_in_range_and_the_next_one_can_be_learned(tmp_path: Path) -> None:
    write_histories(tmp_path / "h", num_users=200, num_items=500, max_length=200)
    histories = pq.read_table(tmp_path / "h")["history"].to_pylist()
    assert {min(h) for h in histories if h} >= {1}
    assert max(max(h) for h in histories if h) <= 500
    followers: dict[int, set[int]] = {}
    pairs = [(a, b) for h in histories for a, b in pairwise(h)]
    for a, b in pairs[: len(pairs) // 2]:
        followers.setdefault(a, set()).add(b)
    seen = [b in followers.get(a, set()) for a, b in pairs[len(pairs) // 2 :]]
    assert np.mean(seen) > 0.7


def test_more_skew_means_fewer_distinct_items(tmp_path: Path) -> None:
    distinct = []
    for exponent in (0.0, 1.05, 1.5):
        write_histories(tmp_path / "h", num_users=50, num_items=10_000, max_length=300, exponent=exponent, follow=0.0)
        items = np.concatenate(pq.read_table(tmp_path / "h")["history"].to_pylist())
        distinct.append(len(np.unique(items)) / len(items))
    assert distinct == sorted(distinct, reverse=True)


def test_senseless_numbers_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="num_users must be at least 1, got 0"):
        write_histories(tmp_path / "h", num_users=0)
    with pytest.raises(ValueError, match="max_length must be at least 3"):
        write_histories(tmp_path / "h", num_users=1, max_length=2)
