"""Checkpoints: which are kept, which are refused, and what is said where they do not fit."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from examples import checkpoint
from tests.ranks import RankPool


def _save(run: Path, *steps: int) -> None:
    for step in steps:
        checkpoint.save({"x": torch.tensor(step)}, run, step)


def _load(run: Path, state: dict[str, torch.Tensor]) -> None:
    newest = checkpoint.newest(run)
    assert newest is not None
    checkpoint.load(state, newest)


def kept(run: Path) -> list[str]:
    return sorted(path.name for path in run.iterdir())


def test_the_newest_up_to_the_last_saved_are_kept(ranks: Callable[[int], RankPool], tmp_path: Path) -> None:
    ranks(2).run(_save, tmp_path, 10, 20, 30)
    assert kept(tmp_path) == ["step_00000020", "step_00000030"]
    ranks(2).run(_save, tmp_path, 25)  # a run that went back to 20 has given 30 up
    assert kept(tmp_path) == ["step_00000020", "step_00000025"]


def _save_and_fail(run: Path) -> None:
    unpicklable = {"x": torch.tensor(10), "y": lambda: None}
    with pytest.raises(OSError, match=r"step_00000010 could not be written: rank 0: .*pickle"):
        checkpoint.save(unpicklable, run, 10)


def test_one_that_is_written_anew_does_not_count_until_it_is_whole(
    ranks: Callable[[int], RankPool], tmp_path: Path
) -> None:
    ranks(1).run(_save, tmp_path, 10)
    ranks(1).run(_save_and_fail, tmp_path)
    assert checkpoint.newest(tmp_path) is None


def test_one_that_does_not_fit_is_an_error_of_one_line(ranks: Callable[[int], RankPool], tmp_path: Path) -> None:
    ranks(2).run(_save, tmp_path, 10)
    for state, said in (({"y": torch.tensor(0)}, "Missing key"), ({"x": torch.zeros(3)}, "Size mismatch")):
        with pytest.raises(Exception, match=f"same flags for model and loader, to be resumed from: rank 0: {said}"):
            ranks(2).run(_load, tmp_path, state)


@pytest.mark.parametrize(("place", "said"), [("", "with --resume, choose"), ("best", ": choose")])
def test_a_used_folder_is_refused(ranks: Callable[[int], RankPool], tmp_path: Path, place: str, said: str) -> None:
    checkpoint.refuse_used(tmp_path)
    ranks(1).run(_save, tmp_path / place, 10)
    with pytest.raises(FileExistsError, match=f"{said} another --out, or remove the folder"):
        checkpoint.refuse_used(tmp_path)
