"""Who asks whom for which rows: one exchange of distinct ids, then rows one way and gradients the other.

Legend: n ids of this rank, U distinct among them, Q requests that reach this rank as an owner, R ranks, D features.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

import fs_kernels
from fs_embed.errors import IdOutOfRange
from fs_embed.peers import Peers
from fs_embed.store import Store, counts_by_rank, counts_in_order, group_equal


@dataclass(frozen=True, slots=True)
class Keys:
    """The ids of lookups as keys of one store."""

    values: Tensor
    """`(n,)` int64, see `RowShards.keys`; -1 for an id that is no row."""
    pieces: Sequence[tuple[int, Tensor]]
    """Table and ids `(n_j,)` of each piece, n = Σ n_j: what an error names."""

    @staticmethod
    def join(parts: "Sequence[Keys]") -> "Keys":
        return Keys(torch.cat([k.values for k in parts]), [piece for k in parts for piece in k.pieces])

    def at(self, place: int) -> tuple[int, int]:
        """Table and id at a place."""
        for table, ids in self.pieces:
            if place < len(ids):
                return table, int(ids[place])
            place -= len(ids)
        raise AssertionError("the place must be one of the keys")


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

    def sum_grads(self, grads: Tensor, of: Tensor | None = None) -> Tensor:
        """`(U, D)`: the gradient of each distinct id, from those at each place `(n, D)`; `of` `(U,)` bool picks ids."""
        if of is None:
            return fs_kernels.segment_sum(grads, self.offsets, index=self.places)
        counts = self.offsets.diff()
        offsets = F.pad(counts[of].cumsum(0), (1, 0))
        return fs_kernels.segment_sum(grads, offsets, index=self.places[of.repeat_interleave(counts)])

    def to_askers(
        self, peers: Peers, rows: Tensor, of: Tensor | None = None, wanted: Tensor | None = None, *, phase: str
    ) -> Tensor:
        """One row for each request, back to who asked: `(U, …)` from `(Q, …)`.

        Args:
            of: `(Q,)` bool: `rows` holds rows of these requests only.
            wanted: `(U,)` bool: the same choice, as the asker knows it.
            phase: What statistics count it as.
        """
        askers, owners = self._counts(self.asker, of, peers), self._counts(self.owner, wanted, peers)
        return peers.all_to_all(rows, askers, owners, phase)

    def to_owners(
        self, peers: Peers, rows: Tensor, of: Tensor | None = None, sent: Tensor | None = None, *, phase: str
    ) -> Tensor:
        """The other way: `(Q, …)` from `(U, …)`; `sent` `(U,)` and `of` `(Q,)` as above."""
        askers, owners = self._counts(self.asker, of, peers), self._counts(self.owner, sent, peers)
        return peers.all_to_all(rows, owners, askers, phase)

    @staticmethod
    def _counts(ranks: Tensor, chosen: Tensor | None, peers: Peers) -> Sequence[int]:
        if peers.group is None:
            return (0,)  # one process keeps what it has
        return counts_by_rank(ranks if chosen is None else ranks[chosen], peers.world_size)


def exchange_ids(peers: Peers, store: Store, keys: Keys) -> Route:
    """Collective: tells each owner which of its rows this rank wants, each once.

    Raises:
        IdOutOfRange: On every rank, when any rank brings an id that is no row.
    """
    groups = group_equal(keys.values)
    distinct, num_slots = groups.distinct, max(1, store.shards.num_slots)
    # -1 is nobody's.
    bad, *counts = counts_in_order(distinct, [-1, *(rank * num_slots for rank in range(peers.world_size + 1))])
    trouble = [1, *keys.at(int(groups.places[0]))] if bad else [0, 0, 0]
    headers = peers.headers("ids", [*trouble, *counts])
    for rank, (failed, table, bad_id, *_) in enumerate(headers):
        if failed:
            raise IdOutOfRange(
                f"ids must be from 0 to {store.shards.num_rows[table] - 1} in table {store.table_names[table]!r}: rank "
                f"{rank} got {bad_id}; check the data, give the table more rows, or ask for hashing"
            )
    recv_counts = [header[3 + peers.rank] for header in headers]
    slots = peers.all_to_all(distinct % num_slots, counts, recv_counts, "ids")
    owner, asker = (ranks_of(numbers, distinct.device) for numbers in (counts, recv_counts))
    return Route(groups.places, groups.offsets, groups.inverse, owner, slots, asker)


def ranks_of(counts: Sequence[int], device: torch.device) -> Tensor:
    """Rank r, `counts[r]` times, for each in turn."""
    repeats = torch.tensor(counts, device=device)
    return torch.arange(len(counts), device=device).repeat_interleave(repeats, output_size=sum(counts))
