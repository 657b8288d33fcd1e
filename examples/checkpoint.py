"""Checkpoints of the whole run by torch.distributed.checkpoint: model, tables, optimizers, loader, random state."""

import shutil
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver


def newest(run: Path) -> Path | None:
    """The newest complete checkpoint of a run."""
    return next(reversed(_complete(run)), None)


def save(state: dict[str, Any], run: Path, step: int, *, keep: int = 2) -> None:
    """Collective: writes `state` as the run's checkpoint of `step`, and drops all but the `keep` newest."""
    state_dict_saver.save(state, checkpoint_id=run / f"step_{step:08d}")
    if dist.get_rank() == 0:
        for old in _complete(run)[:-keep]:
            shutil.rmtree(old)


def load(state: dict[str, Any], path: Path) -> None:
    """Collective: reads the checkpoint into `state`, whose keys say what is wanted."""
    state_dict_loader.load(state, checkpoint_id=path)


def _complete(run: Path) -> list[Path]:
    """Oldest first. DCP writes `.metadata` last, so a checkpoint without it was cut short."""
    return sorted(metadata.parent for metadata in run.glob("step_*/.metadata"))


class RandomState:
    """This rank's random state (dropout draws from it), as a `Stateful`."""

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = {"cpu": torch.get_rng_state()}
        if torch.cuda.is_available():
            state["cuda"] = torch.cuda.get_rng_state()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        torch.set_rng_state(state["cpu"])
        if torch.cuda.is_available():
            torch.cuda.set_rng_state(state["cuda"])
