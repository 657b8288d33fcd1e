"""The main job: same losses whatever overlaps, exact restarts, errors that name the culprit, no rank left waiting."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from examples.settings import Settings
from examples.train import Trainer
from fs_data.generate import write_histories
from tests.ranks import RankFailure, RankPool

NUM_ITEMS = 500


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "histories.parquet"
    write_histories(path, num_users=240, num_items=NUM_ITEMS, max_length=60, rows_per_group=16)
    return path


def settings(data: Path, out: Path, **changes: object) -> Settings:
    small = {"batch_size": 4, "max_length": 60, "dim": 8, "blocks": 1, "log_every": 10, "embedding_lr": 0.1}
    return Settings(**{"data": str(data), "num_items": NUM_ITEMS, "out": out, "timeout_s": 30.0, **small, **changes})


def losses(out: Path) -> dict[int, float]:
    """By step; of a step that was run twice, the later."""
    return {entry["step"]: entry["loss"] for entry in map(json.loads, (out / "losses.jsonl").read_text().splitlines())}


def _train(s: Settings) -> tuple[dict[str, float], torch.Tensor]:
    trainer = Trainer(s, torch.device("cpu"))
    figures = trainer.train()
    weight = trainer.model.state_dict()["item_emb.weight"]
    trainer.close()
    return figures, weight.full_tensor() if hasattr(weight, "full_tensor") else weight


@pytest.mark.parametrize("optimizer", ["sgd", "rowwise_adagrad"])
@pytest.mark.parametrize("partitioner", ["identity", "few_moves"])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_prioritized_and_synchronous_runs_have_the_same_bits(
    ranks: Callable[[int], RankPool], data: Path, tmp_path: Path, size: int, partitioner: str, optimizer: str
) -> None:
    same = {"partitioner": partitioner, "embedding_optimizer": optimizer, "max_steps": 50, "epochs": 9}
    tables = {}
    for mode in ("prioritized", "synchronous"):
        s = settings(data, tmp_path / mode, embeddings=mode, **same)
        tables[mode] = ranks(size).run(_train, s, timeout_s=120)[0][1]
    assert len(losses(tmp_path / "synchronous")) == 50
    assert losses(tmp_path / "prioritized") == losses(tmp_path / "synchronous")
    assert torch.equal(tables["prioritized"], tables["synchronous"])


def test_balancing_changes_no_global_loss(ranks: Callable[[int], RankPool], data: Path, tmp_path: Path) -> None:
    for loader in ("plain", "balanced"):
        s = settings(data, tmp_path / loader, loader=loader, dropout=0.0, double=True, max_steps=25, epochs=9)
        ranks(2).run(_train, s, timeout_s=120)
    plain, balanced = losses(tmp_path / "plain"), losses(tmp_path / "balanced")
    assert len(plain) == 25
    assert all(abs(plain[step] - balanced[step]) < 1e-10 for step in plain)
    assert len(set(plain.values())) == 25


def start(s: Settings, **of_rank_one: object) -> list[subprocess.Popen[str]]:
    """Two ranks without torchrun, whose agent would end one when the other dies."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    processes = []
    for rank in range(2):
        flags: list[str] = []
        values = {name: getattr(s, name) for name in s.__slots__} | (of_rank_one if rank else {})
        for name, value in values.items():
            flag = "--" + name.replace("_", "-")
            flags += [flag] * bool(value) if isinstance(value, bool) else [] if value is None else [flag, str(value)]
        env = os.environ | {
            "RANK": str(rank),
            "WORLD_SIZE": "2",
            "LOCAL_RANK": str(rank),
            "LOCAL_WORLD_SIZE": "2",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "OMP_NUM_THREADS": "1",
        }
        command = [sys.executable, "-W", "ignore", "-m", "examples.train", *flags]
        processes.append(
            subprocess.Popen(command, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        )
    return processes


@pytest.fixture
def ended() -> Iterator[list[subprocess.Popen[str]]]:
    """Processes put in here are gone after the test, whatever happened."""
    processes: list[subprocess.Popen[str]] = []
    yield processes
    for p in processes:
        p.kill()
        p.communicate(timeout=10)


def test_a_killed_rank_is_named_and_a_restart_goes_on_exactly(
    data: Path, tmp_path: Path, ended: list[subprocess.Popen[str]]
) -> None:
    whole = settings(data, tmp_path / "whole", max_steps=60, epochs=9, checkpoint_every=20)
    ended += start(whole)
    for p in ended:
        assert p.wait(90) == 0, p.communicate()[0]

    cut = settings(data, tmp_path / "cut", max_steps=2000, epochs=99, checkpoint_every=20)
    first, second = start(cut)
    ended += [first, second]
    deadline = time.monotonic() + 60
    while not list((tmp_path / "cut").glob("step_*/.metadata")):
        assert time.monotonic() < deadline, first.communicate(timeout=1)[0]
        assert first.poll() is None, first.communicate()[0]
        time.sleep(0.05)
    os.kill(second.pid, signal.SIGKILL)
    text, _ = first.communicate(timeout=30)
    assert first.returncode == 1
    assert "rank 0: lost rank 1 (its process has ended); restart" in text, text

    saved = max(int(p.parent.name[5:]) for p in (tmp_path / "cut").glob("step_*/.metadata"))
    before = {step: loss for step, loss in losses(tmp_path / "cut").items() if step < saved}
    more = settings(data, tmp_path / "cut", max_steps=max(60, saved + 10), epochs=99, checkpoint_every=20, resume=True)
    again = start(more)
    ended += again
    for p in again:
        text, _ = p.communicate(timeout=90)
        assert p.returncode == 0, text
    expected, found = losses(tmp_path / "whole"), before | losses(tmp_path / "cut")
    assert {step: found[step] for step in expected} == expected
    assert len(expected) == 60


def test_a_stopped_rank_is_named(data: Path, tmp_path: Path, ended: list[subprocess.Popen[str]]) -> None:
    ended += start(settings(data, tmp_path / "out", max_steps=2000, epochs=99, timeout_s=5.0))
    deadline = time.monotonic() + 60
    while not (tmp_path / "out" / "losses.jsonl").exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    os.kill(ended[1].pid, signal.SIGSTOP)
    text, _ = ended[0].communicate(timeout=60)
    assert ended[0].returncode == 1
    assert "rank 0: lost rank 1 (its process is stopped, by a signal or a debugger); restart" in text, text


def _errors(processes: list[subprocess.Popen[str]]) -> list[str]:
    texts = []
    for p in processes:
        text, _ = p.communicate(timeout=60)
        assert p.returncode == 1, text
        texts += [line for line in text.splitlines() if line.startswith("train.py: ")]
    return texts


def bad_input(name: str, data: Path, tmp_path: Path) -> tuple[Settings, dict[str, object]]:
    file = tmp_path / "bad.parquet"
    table = pq.read_table(data)
    if name == "ids":
        return settings(data, tmp_path / "out", num_items=50), {}
    if name == "settings":
        return settings(data, tmp_path / "out"), {"batch_size": 9}
    if name == "file":
        return settings(tmp_path / "none.parquet", tmp_path / "out"), {}
    if name == "short":
        one = pa.array([[1]] * table.num_rows, table["history"].type)
        pq.write_table(table.set_column(1, "history", one), file, row_group_size=16)
    if name == "column":
        pq.write_table(table.drop_columns(["history"]), file)
    if name == "null":
        rows = table["history"].to_pylist()
        rows[17] = None
        pq.write_table(table.set_column(1, "history", pa.array(rows, table["history"].type)), file, row_group_size=16)
    return settings(file, tmp_path / "out"), {}


@pytest.mark.parametrize(
    ("name", "pattern"),
    [
        ("file", r"nothing found at .*none\.parquet"),
        ("column", r"must have the columns \['history'\], it has"),
        ("null", r"row group 1, column 'history', row 1: must not be null"),
        ("short", r"must have a history of two items or more"),
        ("ids", r"from 0 to 50 in table 'item_emb': rank [01] got \d+"),
        ("settings", r"rank 1 was started with --batch-size 9, rank 0 with 4"),
    ],
)
def test_bad_input_ends_all_ranks_with_one_line_that_names_it(
    data: Path, tmp_path: Path, ended: list[subprocess.Popen[str]], name: str, pattern: str
) -> None:
    s, of_rank_one = bad_input(name, data, tmp_path)
    ended += start(s, **of_rank_one)
    texts = _errors(ended)
    assert len(texts) == 2, texts
    assert any(re.search(pattern, text) for text in texts), texts


def test_a_run_that_ends_within_an_epoch_is_evaluated_and_its_wait_is_that_of_training(
    ranks: Callable[[int], RankPool], data: Path, tmp_path: Path
) -> None:
    same = {"max_steps": 3, "epochs": 9, "embeddings": "synchronous"}
    found = {}
    for evaluated in (False, True):
        s = settings(data, tmp_path / str(evaluated), evaluate=evaluated, **same)
        found[evaluated] = ranks(2).run(_figures_and_all_waiting, s, timeout_s=60)[0]
    assert found[True][0]["best_epoch"] == 0
    assert found[True][0]["test_hit_rate"] > 0
    figures, waited_ms = found[False]
    assert figures["exposed_ms_per_step"] * 3 == pytest.approx(waited_ms)
    figures, waited_ms = found[True]
    assert figures["exposed_ms_per_step"] * 3 < waited_ms


def _figures_and_all_waiting(s: Settings) -> tuple[dict[str, float], float]:
    """The figures, and the milliseconds that the ranks were blocked on average, evaluation included."""
    trainer = Trainer(s, torch.device("cpu"))
    figures = trainer.train()
    waited = torch.tensor(trainer._exposed_s() / trainer.world_size, dtype=torch.float64)
    torch.distributed.all_reduce(waited)
    trainer.close()
    return figures, 1000 * float(waited)


def test_ranks_without_a_batch_are_an_error(ranks: Callable[[int], RankPool], data: Path, tmp_path: Path) -> None:
    one = tmp_path / "one.parquet"
    pq.write_table(pq.read_table(data).slice(0, 1), one)
    with pytest.raises(RankFailure, match="must have a batch for each of the 2 ranks, or no step can be taken"):
        ranks(2).run(_train, settings(one, tmp_path / "out", loader="plain"), timeout_s=60)
