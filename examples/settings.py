"""The example's flags, and the check that all ranks were started with the same ones."""

import argparse
import dataclasses
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args, get_origin

import torch.distributed as dist


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    data: str
    """Parquet of histories, as `fs_data.generate` or `fs_data.build` writes it."""
    num_items: int
    """Item ids run from 1 to this."""
    out: Path = Path("runs/default")
    """Folder for checkpoints and the log of losses."""
    loader: Literal["balanced", "plain"] = "balanced"
    """`plain` is the DataLoader alone."""
    partitioner: str = "few_moves"
    embeddings: Literal["prioritized", "synchronous"] = "prioritized"
    """`synchronous` is the same training without looking ahead."""
    epochs: int = 1
    max_steps: int = 0
    """Stop after this many steps; 0 means no limit."""
    batch_size: int = 64
    """Users a rank."""
    max_length: int = 50
    dim: int = 50
    blocks: int = 2
    heads: int = 1
    dropout: float = 0.3
    lr: float = 1e-3
    """Of Adam, for the dense part."""
    embedding_optimizer: Literal["rowwise_adagrad", "sgd", "adam"] = "rowwise_adagrad"
    """For the item table."""
    embedding_lr: float = 0.05
    double: bool = False
    """Trains in float64."""
    workers: int = 0
    """DataLoader's worker processes a rank."""
    seed: int = 0
    log_every: int = 50
    """Steps between lines of the log."""
    checkpoint_every: int = 0
    """Steps between checkpoints; 0 saves none."""
    resume: bool = False
    """Continue from the run's newest checkpoint."""
    evaluate: bool = False
    """HR@10 and NDCG@10 on the validation items after each epoch, and on the test items of the best one."""
    timeout_s: float = 60.0
    """Longest wait for another rank."""
    report: Path | None = None
    """Rank 0 writes the run's figures there, as JSON."""

    def __post_init__(self) -> None:
        """Raises what no later error would name by its flag, or nothing would name at all."""
        for name, least in _LEAST.items():
            if not getattr(self, name) >= least:
                raise ValueError(f"{_flag(name)} must be at least {least}, got {getattr(self, name)}")
        for name in ("lr", "embedding_lr", "timeout_s"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{_flag(name)} must be a number above 0, got {getattr(self, name)}")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"--dropout must be from 0 to below 1, got {self.dropout}")
        if self.dim % self.heads:
            raise ValueError(f"--dim must be a multiple of --heads, got {self.dim} and {self.heads}")
        if self.evaluate and self.max_length < 2:
            raise ValueError(f"--evaluate needs a --max-length of at least 2, got {self.max_length}")


_LEAST = {
    "num_items": 1,
    "epochs": 1,
    "max_steps": 0,
    "batch_size": 1,
    "max_length": 1,
    "dim": 1,
    "blocks": 0,
    "heads": 1,
    "workers": 0,
    "seed": 0,
    "log_every": 1,
    "checkpoint_every": 0,
}


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


# What may differ between ranks without harm.
_OWN = ("report",)


def parse(arguments: list[str] | None = None) -> Settings:
    parser = argparse.ArgumentParser(
        prog="examples.train",
        description="Trains a SASRec-like model on parquet histories.",
        epilog="examples/settings.py says what each flag means, and its default.",
    )
    for field in dataclasses.fields(Settings):
        flag, default = _flag(field.name), field.default
        if field.type is bool:
            parser.add_argument(flag, action="store_true")
        elif default is dataclasses.MISSING:
            parser.add_argument(flag, type=field.type, required=True)  # pyright: ignore[reportArgumentType]
        else:
            kind = Path if field.name in ("out", "report") else type(default)
            choices = get_args(field.type) if get_origin(field.type) is Literal else None
            parser.add_argument(flag, type=kind, default=default, choices=choices)
    return Settings(**vars(parser.parse_args(arguments)))


def check_same_settings(settings: Settings) -> None:
    """Collective: raises on every rank, naming the culprit, unless all ranks have rank 0's settings."""
    mine = {k: v for k, v in dataclasses.asdict(settings).items() if k not in _OWN}
    everyone: list[dict[str, object]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(everyone, mine)
    for rank, theirs in enumerate(everyone):
        for name, value in theirs.items():
            if value != everyone[0][name]:
                raise ValueError(
                    f"all ranks need the same settings: rank {rank} was started with {_flag(name)} {value}, rank 0 "
                    f"with {everyone[0][name]}; start them with one command line"
                )
