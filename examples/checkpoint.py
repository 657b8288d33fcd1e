"""Checkpoints of the whole run by torch.distributed.checkpoint: model, tables, optimizers, loader, random state."""

import shutil
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException


def newest(run: Path) -> Path | None:
    """The newest complete checkpoint of a run."""
    return next(reversed(_complete(run)), None)


def save(state: dict[str, Any], run: Path, step: int, *, keep: int = 2) -> None:
    """Collective: writes `state` as the run's checkpoint of `step`, and drops all but the `keep` newest up to it.

    Later ones go too: a restart from before them has given them up.
    """
    path = of_step(run, step)
    if dist.get_rank() == 0:  # no rank writes before rank 0 has planned it
        (path / ".metadata").unlink(missing_ok=True)  # of the same step, if there is one: incomplete from here on
    try:
        state_dict_saver.save(state, checkpoint_id=path)
    except CheckpointException as error:
        raise OSError(f"the checkpoint {path} could not be written: {_first(error)}") from None
    if dist.get_rank() == 0:
        complete = _complete(run)
        up_to_it = [one for one in complete if one <= path]
        for given_up in {*complete} - {*up_to_it[-keep:]}:
            shutil.rmtree(given_up)


def of_step(run: Path, step: int) -> Path:
    return run / f"step_{step:08d}"


def refuse_used(run: Path) -> None:
    """Raises if `run` holds checkpoints: a run that starts anew there would mix with the one that made them."""
    for place, way_out in ((run, "go on from there with --resume, "), (run / "best", "")):
        if found := newest(place):
            raise FileExistsError(
                f"{run} must be free of another run's checkpoints, it has {found}: {way_out}choose another --out, or "
                "remove the folder"
            )


def load(state: dict[str, Any], path: Path) -> None:
    """Collective: reads the checkpoint into `state`, whose keys say what is wanted."""
    try:
        state_dict_loader.load(state, checkpoint_id=path)
    except CheckpointException as error:  # not an Exception
        raise ValueError(
            f"{path} must come from as many ranks and the same flags for model and loader, to be resumed from: "
            f"{_first(error)}"
        ) from None


def _first(error: CheckpointException) -> str:
    rank, (cause, _) = next(iter(error.failures.items()))
    return f"rank {rank}: {cause}"


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
