"""The demo's table: what was measured, over all the steps that were asked for; a failed run fails it."""

import json
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from examples import demo


def _run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, *flags: str) -> int:
    monkeypatch.setattr(sys, "argv", ["demo", "--folder", str(tmp_path), "--users", "30", *flags])
    return demo.main()


def test_the_table_has_the_steps_that_were_taken(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    started: list[Mapping[str, object]] = []

    def train(num_ranks: int, flags: Mapping[str, object]) -> str:
        started.append(flags)
        figures = {key: 7 for key, _ in demo.ROWS.values()}
        Path(str(flags["report"])).write_text(json.dumps(figures | {"steps": 19}))
        return ""

    monkeypatch.setattr(demo, "train", train)
    assert _run(monkeypatch, tmp_path, "--steps", "20") == 0
    assert [(flags["max-steps"], flags["epochs"]) for flags in started] == [(20, 20)] * 2
    shown = capsys.readouterr().out
    assert "30 users, 2 ranks" in shown
    row = next(line for line in shown.splitlines() if line.startswith("│ steps"))
    assert [cell.strip() for cell in row.split("│")[2:4]] == ["19", "19"]


def test_a_failed_run_fails_the_demo(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(demo, "train", lambda num_ranks, flags: "exit status 3")
    assert _run(monkeypatch, tmp_path) == 1
    assert "the run 'plain, synchronous' failed: exit status 3" in capsys.readouterr().out


@pytest.mark.parametrize("flag", ["--ranks", "--users", "--steps"])
def test_numbers_below_one_are_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str], flag: str
) -> None:
    with pytest.raises(SystemExit, match="2"):
        _run(monkeypatch, tmp_path, flag, "0")
    assert f"{flag} must be at least 1, got 0" in capsys.readouterr().err


def test_a_run_that_takes_too_long_is_ended_with_its_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "LIMIT_S", 0.1)
    assert demo.train(1, {"data": "none", "num-items": 1}) == "it took longer than 0.1 s"
