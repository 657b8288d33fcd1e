"""`PrioritizedEmbeddingCollection`: tables looked up by feature, one row for each id, as TorchRec's collection."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Required, Unpack

import torch
from torch import Tensor

from fs_embed.jagged_input import FeatureIds, features_of, read_features
from fs_embed.module import PrioritizedModule
from fs_embed.optim import RowOptimizer
from fs_embed.rows import TableConfig, as_table
from fs_embed.tables import Piece, Sharding, ShardingOptions


class JaggedRows:
    """Rows `(N, D)` of a feature and the lengths `(B,)` of its samples, with the methods of TorchRec's `JaggedTensor`.

    What the collection returns for plain input, so that TorchRec need not be installed.
    """

    def __init__(self, values: Tensor, lengths: Tensor) -> None:
        self._values, self._lengths = values, lengths

    def values(self) -> Tensor:
        return self._values

    def lengths(self) -> Tensor:
        return self._lengths

    def offsets(self) -> Tensor:
        """`(B + 1,)` int64."""
        return torch.cat([self._lengths.new_zeros(1, dtype=torch.int64), torch.cumsum(self._lengths, 0)])

    def to_dense(self) -> list[Tensor]:
        """One tensor for each sample."""
        return list(self._values.split(self._lengths.tolist()))


class FeatureOptions(ShardingOptions, total=False):
    """The keyword arguments of `FeatureModule`."""

    optimizer: Required[RowOptimizer]
    weights: Sequence[Tensor] | None
    device: torch.device | None


class FeatureModule(PrioritizedModule):
    """Tables by feature; the two collections differ in what they make of the rows."""

    state_prefix: str

    def __init__(
        self,
        tables: Sequence[Any],
        *,
        optimizer: RowOptimizer,
        weights: Sequence[Tensor] | None = None,
        device: torch.device | None = None,
        **sharding: Unpack[ShardingOptions],
    ) -> None:
        configs: list[TableConfig] = [as_table(t) for t in tables]
        self.lookups = features_of(configs)
        keys = [f"{self.state_prefix}.{t.name}.weight" for t in configs]
        super().__init__(configs, weights, keys, optimizer=optimizer, sharding=Sharding(**sharding), device=device)
        self.feature_names = tuple(dict.fromkeys(lookup.feature for lookup in self.lookups))
        self._configs = list(tables)

    @property
    def device(self) -> torch.device:
        return self.tables.stores[0].weight.device

    def sources(self, ids: Any) -> tuple[list[Tensor], list[Piece]]:
        sources, features = read_features(ids, self.feature_names)
        return sources, self._pieces(features)

    def _pieces(self, features: dict[str, FeatureIds]) -> list[Piece]:
        return [(lookup.table, features[lookup.feature].values) for lookup in self.lookups]

    def _look_up(self, ids: Any) -> Iterator[tuple[str, int, FeatureIds, Tensor]]:
        """Key, table number, ids and rows `(N, D)` of each lookup."""
        sources, features = read_features(ids, self.feature_names)
        rows = self.tables.look_up(sources, self._pieces(features), training=self.training)
        for lookup, found in zip(self.lookups, rows, strict=True):
            yield lookup.key, lookup.table, features[lookup.feature], found

    def extra_repr(self) -> str:
        tables = ", ".join(f"{t.name}: {t.num_embeddings} × {t.embedding_dim}" for t in self.tables.tables)
        return f"{tables}; {self.tables.sharding.mode}, {self.tables.world_size} ranks"


class PrioritizedEmbeddingCollection(FeatureModule):
    """Row-wise sharded tables whose exchanges overlap with compute (the paper's Algorithm 2); sequence outputs.

    Args:
        tables: `TableConfig` or TorchRec's `EmbeddingConfig`; widths and dtypes may differ.
        optimizer: For all tables; updates rows in the backward.
        weights: `(rows, D)` of each table, the same on every rank; filled by the tables' `init_fn` where None.
        need_indices: Gives a `JaggedTensor` its ids as weights, as TorchRec does.
        sharding: Ranks, mode and more, see `Sharding`. Building the module is collective.
    """

    state_prefix = "embeddings"

    def __init__(self, tables: Sequence[Any], *, need_indices: bool = False, **options: Unpack[FeatureOptions]) -> None:
        super().__init__(tables, **options)
        self._need_indices = need_indices

    def forward(self, features: Any) -> dict[str, Any]:
        """For each feature its rows `(N, D)` and lengths; collective, and every rank must run the backward too.

        Args:
            features: A `KeyedJaggedTensor`, or a mapping from feature to ids (see `read_features`).

        Returns:
            Feature (`feature@table` where several tables look it up) to `JaggedTensor`, or `JaggedRows` for a mapping.
        """
        found = self._look_up(features)
        if isinstance(features, Mapping):
            return {key: JaggedRows(rows, ids.lengths) for key, _, ids, rows in found}
        from torchrec.sparse.jagged_tensor import JaggedTensor  # whoever has a KeyedJaggedTensor has it

        return {
            key: JaggedTensor(rows, lengths=ids.lengths, weights=ids.values if self._need_indices else None)
            for key, _, ids, rows in found
        }

    def embedding_configs(self) -> list[Any]:
        return self._configs

    def embedding_dim(self) -> int:
        return self.tables.tables[0].embedding_dim

    def need_indices(self) -> bool:
        return self._need_indices
