"""Who asks whom for which rows: one exchange of distinct ids, then rows one way and gradients the other.

Legend: n ids of this rank, U distinct among them, Q requests that reach this rank as an owner, R ranks, D features.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

import fs_kernels
from fs_embed.errors import IdOutOfRange, RanksDisagree
from fs_embed.peers import Peers
from fs_embed.rows import RowShards
from fs_embed.store import counts_by_rank, group_equal


@dataclass(frozen=True, slots=True)
class BadId:
    """An id that is no row of its table."""

    id: int
    table: int


@dataclass(slots=True)
class Route:
    """The way between this rank's ids and the slots that hold them."""

    places: Tensor
    """`(n,)`: where the distinct ids occur, grouped; see `store.group_equal`."""
    offsets: Tensor
    """`(U + 1,)`."""
    inverse: Tensor
    """`(n,)`: which distinct id stands at each place."""
    owner: Tensor
    """`(U,)`, non-decreasing: the rank that owns each distinct id."""
    slots: Tensor
    """`(Q,)`: the local rows that ranks ask this one for, rank after rank."""
    asker: Tensor
    """`(Q,)`, non-decreasing: the rank that asks for each."""

    def sum_grads(self, grads: Tensor) -> Tensor:
        """`(U, D)`: the gradient of each distinct id, from those at each place `(n, D)`."""
        return fs_kernels.segment_sum(grads, self.offsets, index=self.places)

    def to_askers(self, peers: Peers, rows: Tensor, of: Tensor | None = None, wanted: Tensor | None = None) -> Tensor:
        """One row for each request, back to who asked: `(U, …)` from `(Q, …)`.

        Args:
            of: `(Q,)` bool: `rows` holds rows of these requests only.
            wanted: `(U,)` bool: the same choice, as the asker knows it.
        """
        asker = self.asker if of is None else self.asker[of]
        owner = self.owner if wanted is None else self.owner[wanted]
        return peers.all_to_all(rows, counts_by_rank(asker, peers.world_size), counts_by_rank(owner, peers.world_size))

    def to_owners(self, peers: Peers, rows: Tensor, of: Tensor | None = None, sent: Tensor | None = None) -> Tensor:
        """The other way: `(Q, …)` from `(U, …)`; `sent` `(U,)` and `of` `(Q,)` as above."""
        asker = self.asker if of is None else self.asker[of]
        owner = self.owner if sent is None else self.owner[sent]
        return peers.all_to_all(rows, counts_by_rank(owner, peers.world_size), counts_by_rank(asker, peers.world_size))


def exchange_ids(
    peers: Peers, shards: RowShards, keys: Tensor, table_names: Sequence[str], *, tag: int, bad: BadId | None = None
) -> Route:
    """Collective: tells each owner which of its rows this rank wants, each once.

    Args:
        keys: `(n,)` int64, see `RowShards.keys`.
        tag: What exchange this is; ranks that are at different ones get an error.
        bad: An id that this rank cannot look up: every rank then raises `IdOutOfRange`.
    """
    distinct, places, offsets = group_equal(keys)
    inverse = torch.empty_like(places)
    inverse[places] = torch.arange(len(distinct), device=keys.device).repeat_interleave(offsets.diff())
    owner = distinct // shards.num_slots
    counts = counts_by_rank(owner, peers.world_size)
    trouble = [1, bad.id, bad.table] if bad else [0, 0, 0]
    header = peers.all_gather(torch.tensor([tag, *trouble, *counts]))  # (R, 4 + R)
    _check(header, tag, shards, table_names)
    recv_counts = header[:, 4 + peers.rank].tolist()
    slots = peers.all_to_all(distinct % shards.num_slots, counts, recv_counts)
    asker = torch.arange(peers.world_size, device=keys.device).repeat_interleave(
        torch.tensor(recv_counts, device=keys.device)
    )
    return Route(places, offsets, inverse, owner, slots, asker)


def _check(header: Tensor, tag: int, shards: RowShards, table_names: Sequence[str]) -> None:
    for rank, (theirs, failed, bad_id, table, *_) in enumerate(header.tolist()):
        if theirs != tag:
            raise RanksDisagree(
                f"every rank must look up, prefetch and flush in the same order: this rank is at exchange {tag}, "
                f"rank {rank} at {theirs}; see that no rank skips a batch or a call"
            )
        if failed:
            raise IdOutOfRange(
                f"ids must be from 0 to {shards.num_rows[table] - 1} in table {table_names[table]!r}: rank {rank} got "
                f"{bad_id}; check the data, or give the table more rows"
            )
