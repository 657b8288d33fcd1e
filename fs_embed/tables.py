"""Sharded tables of one module: where their rows live, how they are looked up, loaded and saved.

The tables are no parameters: DistributedDataParallel would overwrite every rank's shard with rank 0's, and a dense
optimizer or a clipping of gradients would touch them. Their optimizer is fused into the backward.
"""

from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Literal, get_args

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from fs_embed.optim import RowOptimizer
from fs_embed.peers import Peers, world_group
from fs_embed.prioritized import Announced, PrioritizedLookup
from fs_embed.route import BadId
from fs_embed.rows import RowShards, TableConfig
from fs_embed.store import Store
from fs_embed.synchronous import SynchronousLookup

Mode = Literal["prioritized", "synchronous"]


class ShardedTables:
    """Tables of one width and dtype, sharded by rows over the ranks of `group`.

    Args:
        tables: All of one `embedding_dim`.
        weights: `(rows, D)` of each table, the same on every rank: this rank keeps its block.
        group: Whose ranks share the tables; the default group where None, one process without one.
        timeout_s: Longest wait for the other ranks.
        gradient_division: Divides gradients by the number of ranks, as TorchRec's sharded modules do, which fits a loss
            that is a mean over a rank's batch.
    """

    def __init__(
        self,
        tables: Sequence[TableConfig],
        weights: Sequence[Tensor],
        *,
        optimizer: RowOptimizer,
        mode: Mode = "prioritized",
        group: dist.ProcessGroup | None = None,
        timeout_s: float = 300.0,
        gradient_division: bool = True,
    ) -> None:
        if mode not in get_args(Mode):
            raise ValueError(f"mode must be one of {get_args(Mode)}, got {mode!r}")
        self.tables, self.mode = tuple(tables), mode
        self.group = world_group(group)
        members = Peers(self.group)
        self.rank, self.world_size = members.rank, members.world_size
        shards = RowShards([t.num_embeddings for t in tables], self.world_size)
        blocks = [w.detach()[slice_of(shards.owned(t, self.rank))] for t, w in enumerate(weights)]
        self.store = Store(shards, torch.cat(blocks).clone(), optimizer)
        names = [t.name for t in tables]
        divide_by = self.world_size if gradient_division else 1
        self.lookup: SynchronousLookup | PrioritizedLookup
        if mode == "synchronous":
            peers = Peers(exchange_group(self.group, timeout_s))
            self.lookup = SynchronousLookup(self.store, peers, names, divide_by=divide_by)
        else:
            bulk, urgent = (Peers(exchange_group(self.group, timeout_s)) for _ in range(2))
            self.lookup = PrioritizedLookup(self.store, bulk, urgent, names, divide_by=divide_by, timeout_s=timeout_s)

    def keys(self, ids: Sequence[Tensor], table: Sequence[int]) -> tuple[Tensor, BadId | None]:
        """Keys of `ids[j]` in `table[j]`, back to back, and the first id that is no row."""
        parts: list[Tensor] = []
        bad: BadId | None = None
        for part, t in zip(ids, table, strict=True):
            flat = part.detach().reshape(-1)
            out = (flat < 0) | (flat >= self.tables[t].num_embeddings)
            if bad is None and bool(out.any()):
                bad = BadId(int(flat[out][0]), t)
            parts.append(self.store.shards.keys(t, flat.masked_fill(out, 0) if bad else flat))
        return torch.cat(parts) if parts else torch.zeros(0, dtype=torch.int64), bad

    def look_up(self, ids: Tensor, keys: Tensor, bad: BadId | None, *, training: bool) -> Tensor:
        if training and torch.is_grad_enabled():
            if isinstance(self.lookup, SynchronousLookup):
                return self.lookup.forward(keys, bad)
            return self.lookup.forward(ids, keys, bad)
        return self.lookup.evaluate(keys, bad)

    def prefetch(self, lookups: Sequence[tuple[Tensor, Tensor, BadId | None]] | None) -> None:
        if isinstance(self.lookup, PrioritizedLookup):
            self.lookup.prefetch(None if lookups is None else [Announced(*lookup) for lookup in lookups])

    def weight(self, table: int) -> Tensor:
        """`(rows, D)` as a `DTensor` sharded by rows; a plain tensor where there is one process. Flush first."""
        return self._sharded(self.store.weight, table)

    def state(self, table: int) -> dict[str, Tensor]:
        """The optimizer's state of a table, by TorchRec's names, sharded as the weight."""
        return {name: self._sharded(whole, table) for name, whole in self.store.state.items()}

    def load(self, table: int, values: Mapping[str, Tensor]) -> None:
        """Overwrites `"weight"` and optimizer state by tensors, whole or sharded; drops what is deferred."""
        self.lookup.reset()
        slots = self.store.shards.local_slots(table, self.rank)
        for name, value in values.items():
            target = self.store.weight if name == "weight" else self.store.state[name]
            rows = self.tables[table].num_embeddings
            if value.shape != (rows, *target.shape[1:]):
                raise ValueError(
                    f"{name} of table {self.tables[table].name!r} must be {(rows, *target.shape[1:])}, got "
                    f"{tuple(value.shape)}; a table keeps its size from save to load"
                )
            if isinstance(value, DTensor):
                local = value.to_local()
                if len(local) != slots.stop - slots.start:
                    local = value.full_tensor()[slice_of(self.store.shards.owned(table, self.rank))]
            else:
                local = value[slice_of(self.store.shards.owned(table, self.rank))]
            target[slots].copy_(local)

    def _sharded(self, whole: Tensor, table: int) -> Tensor:
        local = whole[self.store.shards.local_slots(table, self.rank)]
        if self.group is None:
            return local
        shape = torch.Size((self.tables[table].num_embeddings, *whole.shape[1:]))
        mesh = DeviceMesh.from_group(self.group, whole.device.type)
        stride = torch.empty(shape, device="meta").stride()
        return DTensor.from_local(local, mesh, [Shard(0)], run_check=False, shape=shape, stride=stride)


def slice_of(rows: range) -> slice:
    return slice(rows.start, rows.stop)


def exchange_group(group: dist.ProcessGroup | None, timeout_s: float) -> dist.ProcessGroup | None:
    """A new group of the same ranks for one thread's exchanges; collective."""
    if group is None:
        return None
    ranks = dist.get_process_group_ranks(group)
    made = dist.new_group(ranks, timeout=timedelta(seconds=timeout_s), backend="gloo")
    assert isinstance(made, dist.ProcessGroup)
    return made
