"""`PrioritizedEmbedding`: one sharded table with the interface of `torch.nn.Embedding`."""

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fs_embed.optim import RowOptimizer
from fs_embed.rows import TableConfig
from fs_embed.tables import Mode, ShardedTables


@runtime_checkable
class JaggedIds(Protocol):
    """Ids of rows of different lengths, such as `fs_data.JaggedColumn`."""

    @property
    def values(self) -> Tensor: ...
    @property
    def offsets(self) -> Tensor: ...


class PrioritizedEmbedding(nn.Module):
    """A row-wise sharded `nn.Embedding` whose exchanges overlap with compute (the paper's Algorithm 2).

    Args:
        weight: `(rows, D)`, the same on every rank; each rank keeps its share of the rows.
        optimizer: Updates the rows in the backward; the table is no parameter.
        mode: `"prioritized"` uses what `prefetch` announces, `"synchronous"` never looks ahead: same bits.
        padding_idx: This row is looked up as it is and gets no gradient.
        group, timeout_s, gradient_division: See `ShardedTables`. Building the module is collective.
        name: What errors call the table.
    """

    def __init__(
        self,
        weight: Tensor,
        *,
        optimizer: RowOptimizer,
        mode: Mode = "prioritized",
        padding_idx: int | None = None,
        group: dist.ProcessGroup | None = None,
        timeout_s: float = 300.0,
        gradient_division: bool = True,
        name: str = "weight",
    ) -> None:
        super().__init__()
        self.num_embeddings, self.embedding_dim = weight.shape
        self.padding_idx = padding_idx
        self.feature_names: tuple[str, ...] = ()
        table = TableConfig(name, self.num_embeddings, self.embedding_dim)
        self.tables = ShardedTables(
            [table],
            [weight],
            optimizer=optimizer,
            mode=mode,
            group=group,
            timeout_s=timeout_s,
            gradient_division=gradient_division,
        )

    def forward(self, input: Tensor) -> Tensor:
        """`(*, D)` for ids `(*)`; collective, and in training every rank must also run the backward."""
        keys, bad = self.tables.keys([input], [0])
        rows = self.tables.look_up(input, keys, bad, training=self.training).view(*input.shape, self.embedding_dim)
        if self.padding_idx is None:
            return rows
        return torch.where((input == self.padding_idx).unsqueeze(-1), rows.detach(), rows)

    def prefetch(self, ids: Sequence[Tensor | JaggedIds] | None) -> None:
        """Announces one forward's lookups in call order, or with None that none follows; ids leave for their owners.

        May run any number of batches ahead, in the order in which they will be looked up, the same on all ranks.
        """
        if ids is None:
            self.tables.prefetch(None)
            return
        tensors = [x if isinstance(x, Tensor) else x.values for x in ids]
        self.tables.prefetch([(x, *self.tables.keys([x], [0])) for x in tensors])

    def flush(self) -> None:
        """Applies deferred updates; needs no other rank to call it too."""
        self.tables.lookup.flush()

    def stats(self) -> dict[str, float]:
        """`exposed_wait_s` (training thread blocked), `bytes_sent`, `hits` and `misses` of announced batches."""
        return self.tables.lookup.stats()

    def extra_repr(self) -> str:
        return f"{self.num_embeddings}, {self.embedding_dim}, {self.tables.mode}, {self.tables.world_size} ranks"

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        self.flush()
        destination[prefix + "weight"] = self.tables.weight(0)

    def _load_from_state_dict(  # pyright: ignore[reportIncompatibleMethodOverride]  torch declares these keyword only
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: Any,
        strict: bool,
        missing_keys: list[str],
        *_: Any,
    ) -> None:
        if prefix + "weight" in state_dict:
            self.tables.load(0, {"weight": state_dict[prefix + "weight"]})
        elif strict:
            missing_keys.append(prefix + "weight")
