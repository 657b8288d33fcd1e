"""A plan as the exchange carries it out: which sample goes where, and what that means for each pair of ranks.

Legend: N samples of all ranks, R ranks, M places (samples that are trained on in this step, and copies).
"""

import hashlib
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, slots=True)
class Features:
    """What is known of all ranks' samples, in global order; every array is `(N,)` int64."""

    rank: Ints
    num_tokens: Ints
    """Length of the history."""
    num_candidates: Ints
    content_sum: Ints
    """Items of all candidates' content."""
    content_sum_of_squares: Ints
    num_bytes: Ints
    group: Ints | None = None
    """Samples with equal keys stay together; None where the schema has no groups."""
    age: Ints | None = None
    """Steps that each sample has waited for."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Who trains on what. Entries are sorted by destination, then by global index."""

    world_size: int
    sample: Ints
    """`(M,)`: global index of each place's sample."""
    destination: Ints
    """`(M,)`: its rank."""
    is_copy: NDArray[np.bool_]
    """`(M,)`: True where a sample only fills a rank that would have none, and weighs 0."""
    features: Features
    cost: Ints
    """`(N,)`."""

    @cached_property
    def fingerprint(self) -> int:
        """63 bits that differ between ranks that would exchange different samples."""
        data = self.sample.tobytes() + self.destination.tobytes()
        return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little") >> 1

    @cached_property
    def moves_anything(self) -> bool:
        return bool((self.features.rank[self.sample] != self.destination).any())

    def received(self, rank: int) -> slice:
        """The entries that end on `rank`."""
        return slice(int(self._bounds[rank]), int(self._bounds[rank + 1]))

    def sent(self, source: int, destination: int) -> Ints:
        """The samples, counted within the batch of `source`, that `destination` takes from it, ascending."""
        samples = self.sample[self.received(destination)]
        first, stop = self._first[source], self._first[source + 1]
        a, b = np.searchsorted(samples, (first, stop))
        return samples[a:b] - first

    @cached_property
    def deferred(self) -> Ints:
        """Global indices of the samples that wait for a later step."""
        return np.setdiff1d(np.arange(len(self.cost)), self.sample)

    def deferred_here(self, rank: int) -> Ints:
        """The samples that wait, counted within the batch of `rank`."""
        first, stop = self._first[rank], self._first[rank + 1]
        return self.deferred[(self.deferred >= first) & (self.deferred < stop)] - first

    def keeps_all(self, rank: int) -> bool:
        """Whether `rank` trains on exactly the batch that it brought."""
        here = self.sample[self.received(rank)]
        first, stop = self._first[rank], self._first[rank + 1]
        return bool(len(here)) and len(here) == stop - first and here[0] == first and here[-1] == stop - 1

    def loads(self) -> tuple[Ints, Ints]:
        """`(R,)` costs of each rank as dealt and as planned; copies count, since they are computed too."""
        return self._by_rank(self.features.rank, self.cost), self._by_rank(self.destination, self.cost[self.sample])

    def tokens(self) -> tuple[Ints, Ints]:
        """`(R,)` tokens of each rank as dealt and as planned."""
        tokens = self.features.num_tokens
        return self._by_rank(self.features.rank, tokens), self._by_rank(self.destination, tokens[self.sample])

    def traffic(self) -> tuple[Ints, Ints]:
        """`(R,)` bytes that each rank sends and receives."""
        source = self.features.rank[self.sample]
        moved = np.where(source != self.destination, self.features.num_bytes[self.sample], 0)
        return self._by_rank(source, moved), self._by_rank(self.destination, moved)

    def _by_rank(self, rank: Ints, amount: Ints) -> Ints:
        total = np.zeros(self.world_size, np.int64)
        np.add.at(total, rank, amount)
        return total

    @cached_property
    def _bounds(self) -> Ints:
        return np.searchsorted(self.destination, np.arange(self.world_size + 1))

    @cached_property
    def _first(self) -> Ints:
        return np.searchsorted(self.features.rank, np.arange(self.world_size + 1))
