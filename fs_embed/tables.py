"""Sharded tables of one module: where their rows live, how they are looked up, loaded and saved.

The tables are no parameters: DistributedDataParallel would overwrite every rank's shard with rank 0's, and a dense
optimizer or a clipping of gradients would touch them. Their optimizer is fused into the backward.
"""

import math
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal, TypedDict, get_args

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

import fs_comm
from fs_embed.optim import RowOptimizer
from fs_embed.peers import Peers, world_group
from fs_embed.prioritized import PrioritizedEngine
from fs_embed.route import Keys
from fs_embed.rows import RowShards, TableConfig
from fs_embed.schedule import Schedule
from fs_embed.store import Store
from fs_embed.synchronous import SynchronousEngine
from fs_embed.ticket import Lookup
from fs_embed.worker import Worker

Mode = Literal["prioritized", "synchronous"]
Piece = tuple[int, Tensor]
"""A table's number and ids `(n,)` to look up in it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sharding:
    """How the tables of a module are spread over ranks and exchanged."""

    mode: Mode = "prioritized"
    """`"prioritized"` uses what `prefetch` announces, `"synchronous"` never looks ahead: same bits."""
    group: dist.ProcessGroup | None = None
    """Whose ranks share the tables; the default group where None, one process without one."""
    timeout_s: float = 300.0
    """Longest wait for the other ranks."""
    gradient_division: bool = True
    """Divides gradients by the number of ranks, as TorchRec's sharded modules do, which fits a loss that is a mean over
    a rank's batch."""
    hash_ids: bool = False
    """Maps ids that are no rows into the table by a hash, in place of an error."""
    loss_scale: Callable[[], float] | None = None
    """What losses are multiplied by, such as `GradScaler.get_scale`: read in each backward, gradients are divided by
    it."""

    check_versions: bool = False
    """Has prioritized tables prove in each step that no row it uses was written after it was read, for 8 bytes a row
    and a synchronization a step; else `StaleRow`."""
    new_group: Callable[[Sequence[int], float], dist.ProcessGroup] | None = None
    """Makes a group for exchanges from global ranks and a timeout in seconds; `fs_comm.new_group` where None."""

    def __post_init__(self) -> None:
        if self.mode not in get_args(Mode):
            raise ValueError(f"mode must be one of {get_args(Mode)}, got {self.mode!r}")
        if not self.timeout_s > 0:
            raise ValueError(f"timeout_s must be above 0, got {self.timeout_s}")


class ShardingOptions(TypedDict, total=False):
    """The fields of `Sharding` as keyword arguments."""

    mode: Mode
    group: dist.ProcessGroup | None
    timeout_s: float
    gradient_division: bool
    hash_ids: bool
    loss_scale: Callable[[], float] | None
    check_versions: bool
    new_group: Callable[[Sequence[int], float], dist.ProcessGroup] | None


class ShardedTables:
    """Tables in stores: those of one width and dtype share one, and so its exchanges.

    Args:
        tables: Distinct names.
        weights: `(rows, D)` of each table, of which this rank keeps its block; None has them filled by `init_fn`.
        optimizer: For all tables.
    """

    def __init__(
        self,
        tables: Sequence[TableConfig],
        weights: Sequence[Tensor] | None,
        *,
        optimizer: RowOptimizer,
        sharding: Sharding,
        device: torch.device | None = None,
    ) -> None:
        self.tables, self.sharding = tuple(tables), sharding
        names = [t.name for t in tables]
        if len(set(names)) < len(names):
            raise ValueError(f"tables must have distinct names, got {names}")
        self.group = world_group(sharding.group)
        members = Peers(self.group)
        self.rank, self.world_size = members.rank, members.world_size
        self._check_same_settings(optimizer)

        kinds = sorted({(t.embedding_dim, str(t.dtype)) for t in tables})
        members_of = [[j for j, t in enumerate(tables) if (t.embedding_dim, str(t.dtype)) == kind] for kind in kinds]
        self.place = {j: (s, i) for s, of_store in enumerate(members_of) for i, j in enumerate(of_store)}
        """Table number -> its store, and its number there."""
        self.stores = [self._make_store(of_store, weights, optimizer, device) for of_store in members_of]
        self.engines = [self._make_engine(store) for store in self.stores]
        workers = [engine.worker for engine in self.engines if isinstance(engine, PrioritizedEngine)]
        groups = [peers.group for engine in self.engines for peers in engine.all_peers()]
        self._release = weakref.finalize(self, _release, workers, groups)
        self._release.atexit = False
        self.schedule = Schedule(self.engines, self._divide_by, looks_ahead=sharding.mode == "prioritized")

    def look_up(self, sources: Sequence[Tensor], pieces: Sequence[Piece], *, training: bool) -> list[Tensor]:
        """`(n, D)` for each piece; `sources` are the tensors by which an announced batch is known again.

        Without `training` nothing is announced, used up or updated.
        """
        keys = self.keys(pieces)
        if training:
            found = self.schedule.look_up(Lookup(sources, keys))
        else:
            found = self.schedule.evaluate(keys)
        parts = [iter(rows.split([len(ids) for _, ids in k.pieces])) for rows, k in zip(found, keys, strict=True)]
        return [next(parts[self.place[table][0]]) for table, _ in pieces]

    def prefetch(self, lookups: Sequence[tuple[Sequence[Tensor], Sequence[Piece]]] | None) -> None:
        if lookups is None:
            self.schedule.prefetch(None)
        else:
            self.schedule.prefetch([Lookup(sources, self.keys(pieces)) for sources, pieces in lookups])

    def keys(self, pieces: Sequence[Piece]) -> list[Keys]:
        """For each store, the keys of its pieces, back to back."""
        of_store: list[list[Piece]] = [[] for _ in self.stores]
        for table, ids in pieces:
            store, number = self.place[table]
            flat = ids.detach().reshape(-1)
            if self.sharding.hash_ids:
                flat = hashed(flat, self.tables[table].num_embeddings)
            of_store[store].append((number, flat))
        return [
            Keys(torch.cat([store.shards.keys(t, ids) for t, ids in mine]) if mine else _no_keys(store), mine)
            for store, mine in zip(self.stores, of_store, strict=True)
        ]

    def flush(self) -> None:
        """Waits until all updates are in the tables; no other rank has to call it."""
        for engine in self.engines:
            engine.flush()

    def close(self) -> None:
        """Ends threads and exchange groups; the tables can be read on. May be called twice."""
        self._release()

    def stats(self) -> dict[str, float]:
        peers = [p for engine in self.engines for p in engine.all_peers()]
        out: dict[str, float] = {
            "exposed_wait_s": sum(engine.exposed_wait_s() for engine in self.engines),
            "bytes_sent": sum(p.bytes_sent.total() for p in peers),
            "hits": self.schedule.hits,
            "misses": self.schedule.misses,
            "absences": self.schedule.absences,
            "skipped_updates": sum(engine.num_skipped for engine in self.engines),
        }
        for phase in sorted({phase for p in peers for phase in p.bytes_sent}):
            name = phase.replace(" ", "_")
            out[f"bytes_sent/{name}"] = sum(p.bytes_sent[phase] for p in peers)
            out[f"wait_s/{name}"] = sum(p.wait_s[phase] for p in peers)
        return out

    def store_of(self, table: int) -> Store:
        return self.stores[self.place[table][0]]

    def weight(self, table: int) -> Tensor:
        """`(rows, D)` as a `DTensor` sharded by rows; a plain tensor where there is one process. Flush first."""
        return self._sharded(self.store_of(table).weight, table)

    def state(self, table: int) -> dict[str, Tensor]:
        """The optimizer's state of a table, by TorchRec's names, sharded as the weight."""
        return {n: self._sharded(whole, table) for n, whole in self.store_of(table).state.items()}

    def load(self, table: int, values: Mapping[str, Tensor]) -> None:
        """Overwrites `"weight"` and optimizer state by tensors, whole or sharded; all ranks must load.

        What was fetched ahead is dropped, and a step that is open ends without gradients.
        """
        self.schedule.meet()
        self.schedule.forget()
        self.flush()
        store = self.store_of(table)
        slots = store.shards.local_slots(self.place[table][1], self.rank)
        rows = self.tables[table].num_embeddings
        for name, value in values.items():
            target = store.weight if name == "weight" else store.state[name]
            if value.shape != (rows, *target.shape[1:]):
                raise ValueError(
                    f"{name} of table {self.tables[table].name!r} must be {(rows, *target.shape[1:])}, got "
                    f"{tuple(value.shape)}; a table keeps its size from save to load"
                )
            target[slots].copy_(self._my_rows(value, table))

    def _my_rows(self, value: Any, table: int) -> Tensor:
        owned = self._owned(table)
        local = value.to_local() if isinstance(value, DTensor) else value
        if hasattr(local, "local_shards"):  # TorchRec's, in a ShardedTensor or within a DTensor
            return _shard_at(owned, local, self.tables[table].name, value.shape)
        if not isinstance(value, DTensor):
            return value[slice_of(owned)]
        if value.placements == (Shard(0),) and value.device_mesh.size() == self.world_size:
            return local
        return value.full_tensor()[slice_of(owned)]

    def _owned(self, table: int) -> range:
        store, number = self.place[table]
        return self.stores[store].shards.owned(number, self.rank)

    def _sharded(self, whole: Tensor, table: int) -> Tensor:
        store, number = self.place[table]
        local = whole[self.stores[store].shards.local_slots(number, self.rank)]
        if self.group is None:
            return local
        shape = torch.Size((self.tables[table].num_embeddings, *whole.shape[1:]))
        mesh = DeviceMesh.from_group(self.group, whole.device.type)
        stride = torch.empty(shape, device="meta").stride()
        return DTensor.from_local(local, mesh, [Shard(0)], run_check=False, shape=shape, stride=stride)

    def _divide_by(self) -> float:
        scale = 1.0 if self.sharding.loss_scale is None else self.sharding.loss_scale()
        return scale * (self.world_size if self.sharding.gradient_division else 1)

    def _make_store(
        self,
        members: Sequence[int],
        weights: Sequence[Tensor] | None,
        optimizer: RowOptimizer,
        device: torch.device | None,
    ) -> Store:
        tables = [self.tables[j] for j in members]
        shards = RowShards([t.num_embeddings for t in tables], self.world_size)
        slots = [shards.local_slots(i, self.rank) for i in range(len(tables))]
        if weights is not None and device is None:
            device = weights[members[0]].device
        weight = torch.empty(slots[-1].stop, tables[0].embedding_dim, dtype=tables[0].dtype, device=device)
        for i, (j, table) in enumerate(zip(members, tables, strict=True)):
            block = weight[slots[i]]
            if weights is None:
                self._fill(block, table)
            else:
                block.copy_(weights[j].detach()[slice_of(shards.owned(i, self.rank))])
        store = Store(shards, [t.name for t in tables], weight, optimizer)
        if self.sharding.check_versions:
            store.versions = torch.zeros(len(weight), dtype=torch.int64, device=weight.device)
        return store

    def _fill(self, block: Tensor, table: TableConfig) -> None:
        if table.init_fn is not None:
            table.init_fn(block)
            return
        # Ranks mostly have the same seed; equal rows in every shard would be a poor start.
        generator = torch.Generator(block.device)
        generator.manual_seed(torch.initial_seed() ^ (int.from_bytes(table.name.encode()[:6]) * 4099 + self.rank))
        bound = 1 / math.sqrt(max(1, table.num_embeddings))
        block.uniform_(-bound, bound, generator=generator)

    def _make_engine(self, store: Store) -> SynchronousEngine | PrioritizedEngine:
        timeout_s = self.sharding.timeout_s
        if self.sharding.mode == "synchronous":
            return SynchronousEngine(store, Peers(exchange_group(self.group, self.sharding)))
        training, evaluation = (Peers(exchange_group(self.group, self.sharding)) for _ in range(2))
        return PrioritizedEngine(store, training, evaluation, timeout_s=timeout_s)

    def _check_same_settings(self, optimizer: RowOptimizer) -> None:
        """Ranks with other tables or another mode would wait for messages that never come."""
        if self.group is None:
            return
        sharding = self.sharding
        mine = {
            "tables": [(t.name, t.num_embeddings, t.embedding_dim, str(t.dtype)) for t in self.tables],
            "optimizer": repr(optimizer),
            "mode": sharding.mode,
            "gradient_division": sharding.gradient_division,
            "hash_ids": sharding.hash_ids,
            "check_versions": sharding.check_versions,
        }
        theirs: list[Any] = [None] * self.world_size
        dist.all_gather_object(theirs, mine, group=self.group)
        for rank, settings in enumerate(theirs):
            for name, value in mine.items():
                if settings[name] != value:
                    raise ValueError(
                        f"{name} must be the same on every rank: this rank has {value}, rank {rank} {settings[name]}"
                    )


def hashed(ids: Tensor, num_rows: int) -> Tensor:
    """`ids` where they are rows, and a row by hash (SplitMix64) where they are not."""
    x = ids.long()
    h = x ^ ((x >> 30) & 0x3FFFFFFFF)
    h = h * -0x40A7B892E31B1A47
    h = h ^ ((h >> 27) & 0x1FFFFFFFFF)
    h = h * -0x6B2FB644ECCEEE15
    h = h ^ ((h >> 31) & 0x1FFFFFFFF)
    return torch.where((x >= 0) & (x < num_rows), x, h.remainder(num_rows))


def _shard_at(rows: range, shards: Any, table_name: str, shape: torch.Size) -> Tensor:
    """The shard of exactly `rows` among TorchRec's local shards: where it cut by rows, its boundaries are ours."""
    local: list[Any] = list(shards.local_shards())
    if hasattr(shards, "local_offsets"):
        found = list(zip(local, shards.local_offsets(), strict=True))
    else:
        found = [(shard.tensor, shard.metadata.shard_offsets) for shard in local]
    for tensor, offsets in found:
        if (offsets[0], tuple(tensor.shape)) == (rows.start, (len(rows), *shape[1:])):
            return tensor.detach()
    if not rows:
        return torch.zeros(0, *shape[1:])
    raise ValueError(
        f"table {table_name!r} must come with this rank's rows {rows.start} to {rows.stop - 1} in one shard, got "
        f"{[(tuple(offsets), tuple(t.shape)) for t, offsets in found]} (offsets, shape): save and load it with "
        "torch.distributed.checkpoint, which cuts anew"
    )


def slice_of(rows: range) -> slice:
    return slice(rows.start, rows.stop)


def exchange_group(group: dist.ProcessGroup | None, sharding: Sharding) -> dist.ProcessGroup | None:
    """A new group of the same ranks for one thread's exchanges; collective."""
    if group is None:
        return None
    ranks = dist.get_process_group_ranks(group)
    if sharding.new_group is not None:
        return sharding.new_group(ranks, sharding.timeout_s)
    if len(ranks) == dist.get_world_size():
        return fs_comm.new_group(ranks, timeout_s=sharding.timeout_s)
    timeout = timedelta(seconds=sharding.timeout_s)  # for some ranks alone: fs_comm's needs every rank to call
    made = dist.new_group(ranks, timeout=timeout, backend="gloo", use_local_synchronization=True)
    assert isinstance(made, dist.ProcessGroup)
    return made


def _release(workers: Sequence[Worker], groups: Sequence[dist.ProcessGroup | None]) -> None:
    """Ends threads, then the groups that only they used; a group whose thread still waits for a rank stays."""
    if all([worker.close() for worker in workers]) and dist.is_initialized():
        for group in groups:
            if group is not None:
                dist.destroy_process_group(group)


def _no_keys(store: Store) -> Tensor:
    return torch.zeros(0, dtype=torch.int64, device=store.weight.device)
