"""From gathered numbers to a plan: costs, groups, the partition function, its check, and copies for ranks left empty.

Legend: N samples of all ranks, R ranks, U units (groups, or single samples), M places (N, and copies).
"""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fs_data.errors import LoaderError
from fs_data.plan import Assignment, RuntimeInfo, WorldBatch

Ints = NDArray[np.int64]
Partition = Callable[[WorldBatch, RuntimeInfo], Assignment]

_HISTORY = 64


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

    def keeps_all(self, rank: int) -> bool:
        """Whether `rank` trains on exactly the batch that it brought."""
        here = self.sample[self.received(rank)]
        first, stop = self._first[rank], self._first[rank + 1]
        return bool(len(here)) and len(here) == stop - first and here[0] == first and here[-1] == stop - 1

    def loads(self) -> tuple[Ints, Ints]:
        """`(R,)` costs of each rank before and after; copies count, since they are computed too."""
        return self._by_rank(self.features.rank, self.cost), self._by_rank(self.destination, self.cost[self.sample])

    def tokens(self) -> tuple[Ints, Ints]:
        """`(R,)` tokens of each rank before and after."""
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


class Planner:
    """Holds the partition function and the cost model, and what they remember from step to step."""

    def __init__(
        self,
        partition: Partition,
        cost: Callable[[Features], Ints],
        *,
        world_size: int,
        host: Ints | None = None,
    ) -> None:
        self.partition, self.cost, self.world_size = partition, cost, world_size
        self.host = np.zeros(0, np.int64) if host is None else host
        self._compute_ns: list[Ints] = []

    def coefficients(self) -> Ints:
        """This rank's cost coefficients; those of rank 0 are used by all."""
        return np.zeros(0, np.int64)

    def plan(self, step: int, features: Features, compute_ns: Ints, coefficients: Ints) -> Plan:
        """The same plan on every rank, from gathered numbers.

        Args:
            step: Counts the loader's batches.
            compute_ns: `(R,)` times of one earlier step; −1 where a rank has none.
            coefficients: `(R, 4)`.
        """
        num_samples = len(features.rank)
        if not num_samples:
            raise LoaderError(f"batch {step} is empty on every rank; at least one rank's loader must give samples")
        if (compute_ns >= 0).all():
            self._compute_ns = [*self._compute_ns[1 - _HISTORY :], compute_ns]
        cost = _as_ints(self.cost(features), "cost", num_samples)
        if (cost < 0).any():
            raise LoaderError(f"cost must be at least 0, got {cost.min()}")
        history = np.stack(self._compute_ns) if self._compute_ns else np.zeros((0, self.world_size), np.int64)
        runtime = RuntimeInfo(step=step, host=self.host, compute_ns=history)
        return self._complete(features, cost, self._assign(features, cost, runtime))

    def _assign(self, features: Features, cost: Ints, runtime: RuntimeInfo) -> Ints:
        """`(N,)` destinations; groups go to the partition function as one unit each."""
        unit, rank = _units(features)
        world = WorldBatch(
            world_size=self.world_size,
            rank=rank,
            cost=_sum_by(unit, cost),
            num_tokens=_sum_by(unit, features.num_tokens),
            num_bytes=_sum_by(unit, features.num_bytes),
        )
        destination = _as_ints(self.partition(world, runtime), "the partition function", len(rank))
        if destination.min() < 0 or destination.max() >= self.world_size:
            raise LoaderError(
                f"the partition function must give ranks from 0 to {self.world_size - 1}, "
                f"got {destination.min()} to {destination.max()}"
            )
        missing = np.flatnonzero(np.bincount(destination, minlength=self.world_size) == 0)
        if (
            len(missing)
            and len(rank) >= self.world_size
            and not getattr(self.partition, "may_leave_ranks_empty", False)
        ):
            raise LoaderError(
                f"the partition function must give every rank at least one sample, ranks {missing.tolist()} got none "
                "of "
                f"{len(rank)}"
            )
        return destination[unit]

    def _complete(self, features: Features, cost: Ints, destination: Ints) -> Plan:
        """Adds a copy of the cheapest sample to each rank that has none: an empty batch would make a NaN loss."""
        empty = np.flatnonzero(np.bincount(destination, minlength=self.world_size) == 0)
        sample = np.r_[np.arange(len(destination)), np.full(len(empty), int(cost.argmin()))]
        destination = np.r_[destination, empty]
        is_copy = np.arange(len(sample)) >= len(features.rank)
        order = np.lexsort((sample, destination))
        return Plan(
            world_size=self.world_size,
            sample=sample[order],
            destination=destination[order],
            is_copy=is_copy[order],
            features=features,
            cost=cost,
        )


def _units(features: Features) -> tuple[Ints, Ints]:
    """`(N,)` unit of each sample, and `(U,)` rank of each unit: that of its first sample, so non-decreasing."""
    if features.group is None:
        return np.arange(len(features.rank)), features.rank
    _, first, inverse = np.unique(features.group, return_index=True, return_inverse=True)
    order = np.argsort(first)
    position = np.empty_like(order)
    position[order] = np.arange(len(order))
    return position[inverse.ravel()], features.rank[first[order]]


def _sum_by(unit: Ints, amount: Ints) -> Ints:
    total = np.zeros(int(unit.max()) + 1, np.int64)
    np.add.at(total, unit, amount)
    return total


def _as_ints(value: Any, name: str, size: int) -> Ints:
    array = np.asarray(value)
    if array.shape != (size,) or not np.issubdtype(array.dtype, np.integer):
        raise LoaderError(f"{name} must give ({size},) integers, got {array.shape} {array.dtype}")
    return array.astype(np.int64)
