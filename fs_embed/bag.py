"""`PrioritizedEmbeddingBag`: one sharded table with the interface of `torch.nn.EmbeddingBag`."""

from typing import Any, Literal, Unpack

import torch
from torch import Tensor

from fs_embed.module import JaggedIds, PrioritizedModule
from fs_embed.optim import RowOptimizer
from fs_embed.rows import TableConfig
from fs_embed.tables import Piece, Sharding, ShardingOptions


class PrioritizedEmbeddingBag(PrioritizedModule):
    """A row-wise sharded `nn.EmbeddingBag`; see `PrioritizedEmbedding` for the arguments.

    Args:
        pooling: As `nn.EmbeddingBag`'s `mode`; `"max"` is not offered.
    """

    def __init__(
        self,
        weight: Tensor,
        *,
        optimizer: RowOptimizer,
        pooling: Literal["sum", "mean"] = "mean",
        padding_idx: int | None = None,
        include_last_offset: bool = False,
        name: str = "weight",
        **sharding: Unpack[ShardingOptions],
    ) -> None:
        num_embeddings, embedding_dim = weight.shape
        table = TableConfig(name, num_embeddings, embedding_dim, dtype=weight.dtype, pooling=pooling)
        super().__init__([table], [weight], ["weight"], optimizer=optimizer, sharding=Sharding(**sharding))
        self.num_embeddings, self.embedding_dim = num_embeddings, embedding_dim
        self.pooling, self.padding_idx, self.include_last_offset = pooling, padding_idx, include_last_offset

    def forward(self, input: Tensor, offsets: Tensor | None = None, per_sample_weights: Tensor | None = None) -> Tensor:
        """`(B, D)` for `input` `(B, L)`, or `(N,)` with the bags' first places `offsets` `(B,)`; collective."""
        rows = self.tables.look_up(*self.sources(input), training=self.training)[0]
        ids, num_ids = input.reshape(-1), input.numel()
        if input.dim() == 2:
            bag = torch.arange(len(input), device=ids.device).repeat_interleave(input.shape[1])
            num_bags = len(input)
        else:
            if offsets is None:
                raise ValueError("offsets must be given with 1-d ids: they say where each bag begins")
            starts = offsets[:-1] if self.include_last_offset else offsets
            num_bags = len(starts)
            bag = torch.searchsorted(starts.contiguous(), torch.arange(num_ids, device=ids.device), right=True) - 1
        counted = torch.ones_like(ids, dtype=rows.dtype)
        if self.padding_idx is not None:
            counted = (ids != self.padding_idx).to(rows.dtype)
        if per_sample_weights is not None:
            if self.pooling != "sum":
                raise ValueError(f"per_sample_weights need sum pooling, this table has {self.pooling}")
            counted = counted * per_sample_weights.reshape(-1)
        out = rows.new_zeros(num_bags, self.embedding_dim).index_add(0, bag, rows * counted[:, None])
        if self.pooling == "mean":
            out = out / rows.new_zeros(num_bags).index_add(0, bag, counted).clamp(min=1)[:, None]
        return out

    def sources(self, ids: Any) -> tuple[list[Tensor], list[Piece]]:
        values = ids.values if not isinstance(ids, Tensor) and isinstance(ids, JaggedIds) else ids
        return [values], [(0, values.reshape(-1))]
