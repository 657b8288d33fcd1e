"""Checkpoints of the whole run by torch.distributed.checkpoint: model, tables, optimizers, loader, random state."""

import shutil
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver


def newest(run: Path) -> Path | None:
    """The newest complete checkpoint of a run; DCP writes `.metadata` last, so one without it was cut short."""
    complete = [p.parent for p in run.glob("step_*/.metadata")]
    return max(complete, key=lambda p: int(p.name.removeprefix("step_")), default=None)


def save(state: dict[str, Any], run: Path, step: int, *, keep: int = 2) -> None:
    """Collective: writes `state` as the run's checkpoint of `step`, and drops all but the `keep` newest."""
    state_dict_saver.save(state, checkpoint_id=run / f"step_{step:08d}")
    if rank() == 0:
        complete = sorted(run.glob("step_*/.metadata"))
        for old in complete[:-keep]:
            shutil.rmtree(old.parent)


def load(state: dict[str, Any], path: Path) -> None:
    """Collective: reads the checkpoint into `state`, whose keys say what is wanted."""
    state_dict_loader.load(state, checkpoint_id=path)


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


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
