"""The two loaders that the example compares: balanced by fs_data, or plain with the least that training needs."""

import warnings
from collections.abc import Callable, Iterator
from typing import Any, cast

import torch
import torch.distributed as dist
from torchdata.stateful_dataloader import StatefulDataLoader

from examples.data import Batch, NextItemTask, jagged
from examples.model import SequenceModel
from examples.settings import Settings
from fs_data import BalancedDataLoader
from fs_data.parquet import ParquetUIHDataset


def make_loader(
    settings: Settings, task: NextItemTask, model: SequenceModel, device: torch.device
) -> "BalancedDataLoader[Batch] | PlainLoader":
    """This rank's training batches: `{"user", "seq", "pos", "neg"}`; the plain loader's are on the CPU."""
    dataset = ParquetUIHDataset(
        settings.data,
        columns=["user", "history"],
        batch_size=settings.batch_size,
        max_uih=settings.max_length + 1,  # one more than the model sees: the newest item is only ever a target
        shuffle=True,
        seed=settings.seed,
    )
    collate = cast("Callable[[Any], Batch]", task)  # one batch in, one out: with batch_size=None nothing is collated
    with warnings.catch_warnings():  # torchdata 0.11 calls what torch 2.13 deprecates
        warnings.filterwarnings("ignore", "'set_vital' is deprecated")
        loader = StatefulDataLoader(
            dataset,
            batch_size=None,
            collate_fn=collate,
            num_workers=settings.workers,
            generator=torch.Generator(),  # else each pass takes a number from the stream that dropout draws from
        )
    plain = cast("StatefulDataLoader[Batch]", loader)
    if settings.loader == "plain":
        return PlainLoader(plain, dataset)
    balanced = BalancedDataLoader(
        plain,
        partitioner=settings.partitioner,
        weights={"positions": count_positions},
        device=device if device.type == "cuda" else None,
        timeout_s=settings.timeout_s,
    )
    if settings.embeddings == "prioritized":
        balanced.feeds(model, {"item_emb": lambda b: [column.values for column in jagged(b, "seq", "pos", "neg")]})
    return balanced


def count_positions(batch: Batch) -> torch.Tensor:
    """`(B,)`: how many next items each user's row asks for."""
    return jagged(batch, "seq")[0].lengths


class PlainLoader:
    """A loader with what uneven ranks force on every training loop: one collective before each step.

    It stops all ranks when the first runs out, and finds the batch's weight in the mean over the global batch.
    """

    def __init__(self, loader: StatefulDataLoader[Batch], dataset: ParquetUIHDataset) -> None:
        self.loader, self.dataset = loader, dataset
        self._positions_of_all = 0

    def __iter__(self) -> Iterator[Batch]:
        batches = iter(self.loader)
        while True:
            batch = next(batches, None)
            have = torch.tensor([batch is None, 0 if batch is None else int(count_positions(batch).sum())])
            dist.all_reduce(have)
            if have[0] or batch is None:
                return
            self._positions_of_all = int(have[1])
            yield batch

    def loss_scale(self, batch: Batch, task: str) -> float:
        """What makes DDP's average of the ranks' means the mean over the global batch's positions."""
        assert task == "positions"
        return dist.get_world_size() * int(count_positions(batch).sum()) / max(self._positions_of_all, 1)

    def set_epoch(self, epoch: int) -> None:
        self.dataset.set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        return self.loader.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.loader.load_state_dict(state)

    def close(self) -> None:
        """Nothing runs in the background."""
