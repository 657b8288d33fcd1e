"""Leave-one-out evaluation: HR@10 and NDCG@10 of the held-out item among 100 random ones."""

from collections.abc import Iterator
from itertools import islice
from typing import cast

import torch
import torch.distributed as dist

from examples.data import Batch, RankingTask, dense, jagged
from examples.metrics import ranking_sums
from examples.model import SequenceModel
from fs_data import JaggedColumn
from fs_data.parquet import ParquetUIHDataset

_COLUMNS = ("user", "history", "validation")


def check_columns(data: str) -> None:
    """Raises now what `evaluate` would after an epoch: what it reads is not there, or of another kind."""
    batches = iter(ParquetUIHDataset(data, columns=[*_COLUMNS, "test"], batch_size=1, prefetch_bytes=0))
    for batch in islice(batches, 1):
        dense(cast("Batch", batch), "user", "validation", "test")


@torch.no_grad()
def evaluate(model: SequenceModel, data: str, split: str, *, batch_size: int, device: torch.device) -> dict[str, float]:
    """Collective: `{"hit_rate", "ndcg"}` at 10 over all users of all ranks, for the `"validation"` or `"test"` item."""
    columns = [*_COLUMNS, *(["test"] if split == "test" else [])]
    length = model.config.max_length - (split == "test")  # the validation item is appended to the test's input
    dataset = ParquetUIHDataset(data, columns=columns, batch_size=batch_size, max_uih=length)
    task = RankingTask(model.config.num_items, split)
    sums = torch.zeros(3, dtype=torch.float64)
    was_training = model.training
    model.eval()
    for batch in _equal_steps(map(task, cast("Iterator[Batch]", iter(dataset))), task.num_negatives + 1):
        (seq,), (candidates,) = jagged(batch, "seq"), dense(batch, "candidates")
        sums += ranking_sums(model.score(seq.to(device), candidates.to(device)).cpu())
    model.train(was_training)
    dist.all_reduce(sums)
    if not sums[2]:
        raise ValueError(f"{data} must have users with a {split} item to evaluate by, all have 0")
    return {"hit_rate": float(sums[0] / sums[2]), "ndcg": float(sums[1] / sums[2])}


def _equal_steps(batches: Iterator[Batch], num_candidates: int) -> Iterator[Batch]:
    """`batches`, then empty ones until every rank has run out: looking items up takes all ranks."""
    nothing: Batch = {
        "seq": JaggedColumn(torch.zeros(0, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)),
        "candidates": torch.zeros(0, num_candidates, dtype=torch.int64),
    }
    while True:
        batch = next(batches, None)
        anyone = torch.tensor(batch is not None, dtype=torch.int32)
        dist.all_reduce(anyone, op=dist.ReduceOp.MAX)
        if not anyone:
            return
        yield nothing if batch is None else batch
