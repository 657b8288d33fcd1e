"""Who owns which row: tables cut by rows into one contiguous block a rank, with TorchRec's boundaries.

Several tables of one width live in one store: a rank's blocks stand one after another in its local weight, so that a
row is a (rank, slot) pair and the two numbers make one integer key. Pure arithmetic, the same on every rank.

Legend: R ranks, T tables, n ids.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class TableConfig:
    """One embedding table; the names are those of TorchRec's `EmbeddingConfig`, which works in its place."""

    name: str
    num_embeddings: int
    """Rows."""
    embedding_dim: int
    feature_names: Sequence[str] = ()
    """Features of a `KeyedJaggedTensor` that look up here."""
    dtype: torch.dtype = torch.float32
    """How rows are stored and exchanged; updates are computed in float32."""
    init_fn: Callable[[Tensor], object] | None = None
    """Fills this rank's rows in place; uniform in ±1/√rows where None, as TorchRec does."""
    pooling: Literal["sum", "mean"] = "sum"
    """How `PrioritizedEmbeddingBagCollection` pools."""


def as_table(config: object) -> TableConfig:
    """A `TableConfig` from one, or from TorchRec's `EmbeddingConfig` or `EmbeddingBagConfig`."""
    if isinstance(config, TableConfig):
        return config
    wanted = ("name", "num_embeddings", "embedding_dim", "feature_names")
    if not all(hasattr(config, name) for name in wanted):
        raise ValueError(f"a table must be a TableConfig or TorchRec's EmbeddingConfig, got {type(config).__name__}")
    read = partial(getattr, config)
    data_type = str(getattr(read("data_type", None), "value", "FP32"))
    if data_type not in _DTYPES:
        raise ValueError(f"data_type of table {read('name')!r} must be one of {sorted(_DTYPES)}, got {data_type}")
    pooling = str(getattr(read("pooling", None), "value", "SUM")).lower()
    return TableConfig(
        name=read("name"),
        num_embeddings=read("num_embeddings"),
        embedding_dim=read("embedding_dim"),
        feature_names=tuple(read("feature_names")),
        dtype=_DTYPES[data_type],
        init_fn=read("init_fn", None),
        pooling="mean" if pooling == "mean" else "sum",
    )


_DTYPES = {"FP32": torch.float32, "FP16": torch.float16, "BF16": torch.bfloat16}


class RowShards:
    """The blocks of all tables of a store: rank r owns rows `r·c` to `(r + 1)·c` of a table, `c = ceil(rows / R)`."""

    def __init__(self, num_rows: Sequence[int], world_size: int) -> None:
        self.num_rows, self.world_size = tuple(num_rows), world_size
        self.block_rows = tuple(max(1, -(-n // world_size)) for n in num_rows)  # c of each table
        sizes = [[self._bounds(t, r) for t in range(len(num_rows))] for r in range(world_size)]
        self._slots = [[stop - start for start, stop in of_rank] for of_rank in sizes]  # (R, T) rows of each block
        self.num_slots = max((sum(of_rank) for of_rank in self._slots), default=0)
        """Local rows of the fullest rank: keys are `rank · num_slots + slot`."""

    def _bounds(self, table: int, rank: int) -> tuple[int, int]:
        n, c = self.num_rows[table], self.block_rows[table]
        return min(rank * c, n), min((rank + 1) * c, n)

    def owned(self, table: int, rank: int) -> range:
        """The rows of a table that a rank owns."""
        return range(*self._bounds(table, rank))

    def local_slots(self, table: int, rank: int) -> slice:
        """Where those rows stand in the rank's local weight."""
        start = sum(self._slots[rank][:table])
        return slice(start, start + self._slots[rank][table])

    def row_at(self, slot: int, rank: int) -> tuple[int, int]:
        """Table and row that stand at a slot of the rank."""
        for table, num_slots in enumerate(self._slots[rank]):
            if slot < num_slots:
                return table, self._bounds(table, rank)[0] + slot
            slot -= num_slots
        raise AssertionError("the slot must be one of the rank's")

    def keys(self, table: int, ids: Tensor) -> Tensor:
        """`(n,)` int64: `rank · num_slots + slot` of each row of `ids` `(n,)`, any integer dtype; -1 for no row."""
        ids = ids.long()
        is_row = (ids >= 0) & (ids < self.num_rows[table])
        ids = ids.clamp(0, max(0, self.num_rows[table] - 1))
        rank = ids // self.block_rows[table]
        first = torch.tensor([sum(of_rank[:table]) for of_rank in self._slots], device=ids.device)  # (R,)
        keys = rank * self.num_slots + first[rank] + ids - rank * self.block_rows[table]
        return keys.masked_fill_(~is_row, -1)
