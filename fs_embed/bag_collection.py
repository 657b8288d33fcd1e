"""`PrioritizedEmbeddingBagCollection`: tables looked up by feature, one pooled row for each sample.

Pooling happens where the samples are, on rows that came once for each distinct id: a table's rows are shared between
samples, so this sends less than pooling at the owners would wherever ids repeat, and is exact for any weights.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Unpack

import torch
from torch import Tensor

from fs_embed.collection import FeatureModule, FeatureOptions
from fs_embed.jagged_input import FeatureIds


class PrioritizedEmbeddingBagCollection(FeatureModule):
    """As `PrioritizedEmbeddingCollection`, with `pooling` `"sum"` or `"mean"` of a table's `TableConfig`.

    With `is_weighted` the input's weights multiply the rows, with sum pooling only, and get gradients; else they are
    left alone, as TorchRec does.
    """

    state_prefix = "embedding_bags"

    def __init__(self, tables: Sequence[Any], *, is_weighted: bool = False, **options: Unpack[FeatureOptions]) -> None:
        super().__init__(tables, **options)
        self._is_weighted = is_weighted

    def forward(self, features: Any) -> Any:
        """`KeyedTensor` of `(B, ΣD)` for a `KeyedJaggedTensor`; for a mapping, feature to `(B, D)`."""
        pooled = {key: self._pool(table, ids, rows) for key, table, ids, rows in self._look_up(features)}
        if isinstance(features, Mapping):
            return pooled
        from torchrec.sparse.jagged_tensor import KeyedTensor  # whoever has a KeyedJaggedTensor has it

        return KeyedTensor(list(pooled), [p.shape[1] for p in pooled.values()], torch.cat(list(pooled.values()), 1))

    def _pool(self, table: int, ids: FeatureIds, rows: Tensor) -> Tensor:
        config = self.tables.tables[table]
        if self._is_weighted:
            if ids.weights is None:
                raise ValueError("ids must come with weights, since the collection is_weighted; these have none")
            if config.pooling == "mean":
                raise ValueError(
                    f"table {config.name!r} pools by mean, which takes no weights: use sum, or leave them out"
                )
            rows = rows * ids.weights.to(rows.dtype)[:, None]
        sample = torch.arange(len(ids.lengths), device=rows.device).repeat_interleave(ids.lengths)
        out = rows.new_zeros(len(ids.lengths), rows.shape[1]).index_add(0, sample, rows)
        if config.pooling == "mean":
            out = out / ids.lengths.clamp(min=1)[:, None].to(out.dtype)
        return out

    def embedding_bag_configs(self) -> list[Any]:
        return self._configs

    def is_weighted(self) -> bool:
        return self._is_weighted
