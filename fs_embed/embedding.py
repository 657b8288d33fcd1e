"""`PrioritizedEmbedding`: one sharded table with the interface of `torch.nn.Embedding`."""

from typing import Any, Unpack

import torch
from torch import Tensor

from fs_embed.module import JaggedIds, PrioritizedModule
from fs_embed.optim import RowOptimizer
from fs_embed.rows import TableConfig
from fs_embed.tables import Piece, Sharding, ShardingOptions


class PrioritizedEmbedding(PrioritizedModule):
    """A row-wise sharded `nn.Embedding` whose exchanges overlap with compute (the paper's Algorithm 2).

    Args:
        weight: `(rows, D)`, the same on every rank; each rank keeps its share of the rows.
        optimizer: Updates the rows in the backward; the table is no parameter.
        padding_idx: This row is looked up as it is and gets no gradient.
        name: What errors call the table.
        sharding: Ranks, mode and more, see `Sharding`. Building the module is collective.
    """

    def __init__(
        self,
        weight: Tensor,
        *,
        optimizer: RowOptimizer,
        padding_idx: int | None = None,
        name: str = "weight",
        **sharding: Unpack[ShardingOptions],
    ) -> None:
        num_embeddings, embedding_dim = weight.shape
        table = TableConfig(name, num_embeddings, embedding_dim, dtype=weight.dtype)
        super().__init__([table], [weight], ["weight"], optimizer=optimizer, sharding=Sharding(**sharding))
        self.num_embeddings, self.embedding_dim, self.padding_idx = num_embeddings, embedding_dim, padding_idx

    def forward(self, input: Tensor) -> Tensor:
        """`(*, D)` for ids `(*)`; collective, and in training every rank must also run the backward."""
        found = self.tables.look_up(*self.sources(input), training=self.training)
        rows = found[0].view(*input.shape, self.embedding_dim)
        if self.padding_idx is None:
            return rows
        return torch.where((input == self.padding_idx).unsqueeze(-1), rows.detach(), rows)

    def sources(self, ids: Any) -> tuple[list[Tensor], list[Piece]]:
        values = ids.values if not isinstance(ids, Tensor) and isinstance(ids, JaggedIds) else ids
        if not isinstance(values, Tensor) or values.is_floating_point():
            raise ValueError(f"ids must be an integer tensor or jagged ids, got {type(ids).__name__}")
        return [values], [(0, values.reshape(-1))]

    def extra_repr(self) -> str:
        tables = self.tables
        return f"{self.num_embeddings}, {self.embedding_dim}, {tables.sharding.mode}, {tables.world_size} ranks"
