"""Caps on what a rank may get: tokens, because activation memory grows with them, and samples."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from fs_data.errors import LoaderError
from fs_data.plan import Assignment, RuntimeInfo, WorldBatch

if TYPE_CHECKING:
    from fs_data.partition import Partitioner

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Capped:
    """`inner`'s plan, changed as far as caps need; what else `inner` has is passed through.

    Where changing it does not do, samples are placed anew, those with most tokens first. Batches that cannot fit are an
    error on every rank: a sample over `max_tokens`, or more in all than the ranks may hold together.
    """

    inner: "Partitioner"
    max_tokens: int | None = None
    """Most tokens of a rank."""
    max_samples: int | None = None
    """Most samples of a rank."""

    def __post_init__(self) -> None:
        for name in ("max_tokens", "max_samples"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, or None for no cap, got {value}")

    def __call__(self, world: WorldBatch, runtime: RuntimeInfo) -> Assignment:
        most_tokens = np.iinfo(np.int64).max if self.max_tokens is None else self.max_tokens
        most_samples = int(_samples(world).sum()) if self.max_samples is None else self.max_samples
        self._check(world, most_tokens, most_samples)
        destination = self.inner(world, runtime)
        changed = destination.copy()
        if _relieve(changed, world, most_tokens, most_samples):
            return changed
        placed = _place(world, most_tokens, most_samples, first=world.num_tokens)
        if placed is None and world.num_samples is not None:
            placed = _place(world, most_tokens, most_samples, first=world.num_samples)
        if placed is None:
            raise LoaderError(
                f"no plan was found with at most {self.max_tokens} tokens and {self.max_samples} samples a rank, for "
                f"{int(world.num_tokens.sum())} tokens of {_samples(world).sum()} samples on {world.world_size} ranks; "
                "raise the caps or draw smaller batches"
            )
        return placed

    def _check(self, world: WorldBatch, most_tokens: int, most_samples: int) -> None:
        size, tokens, samples = world.world_size, world.num_tokens, _samples(world)
        if int(tokens.max(initial=0)) > most_tokens:
            raise LoaderError(
                f"max_tokens must allow for every sample, but sample {int(tokens.argmax())} has {tokens.max()} tokens "
                f"and max_tokens is {most_tokens}; raise it or truncate histories"
            )
        if int(tokens.sum()) > most_tokens * size:
            raise LoaderError(
                f"max_tokens must allow for the whole batch, but it has {tokens.sum()} tokens and {size} ranks may "
                f"hold {most_tokens} each; raise it or draw smaller batches"
            )
        if int(samples.max(initial=0)) > most_samples:
            raise LoaderError(
                f"max_samples must allow for every group, but one has {samples.max()} samples and max_samples is "
                f"{most_samples}; raise it or cut groups"
            )
        if int(samples.sum()) > most_samples * size:
            raise LoaderError(
                f"max_samples must allow for the whole batch, but it has {samples.sum()} samples and {size} ranks may "
                f"hold {most_samples} each; raise it or draw smaller batches"
            )

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "inner":
            raise AttributeError(name)
        return getattr(self.inner, name)


def _samples(world: WorldBatch) -> Ints:
    """`(N,)`: how many each entry stands for."""
    return np.ones_like(world.num_tokens) if world.num_samples is None else world.num_samples


def _relieve(destination: Assignment, world: WorldBatch, most_tokens: int, most_samples: int) -> bool:
    """Moves samples off ranks over a cap, in place, to the ranks with most room; whether that was enough.

    A rank with too many tokens first swaps its longest sample against a shorter one, so that counts stay; where no swap
    helps, and from a rank with too many samples, the shortest that does moves alone.
    """
    size, tokens, samples = world.world_size, world.num_tokens, _samples(world)
    load, count = np.zeros(size, np.int64), np.zeros(size, np.int64)
    np.add.at(load, destination, tokens)
    np.add.at(count, destination, samples)
    for _ in range(2 * len(tokens)):
        over = np.flatnonzero((load > most_tokens) | (count > most_samples))
        if not len(over):
            return True
        a = int(over[0])
        mine = np.flatnonzero(destination == a)
        b = int(np.lexsort((load, np.arange(size) == a))[0])
        theirs = np.flatnonzero(destination == b)
        x = int(mine[tokens[mine].argmax()])
        y = int(theirs[tokens[theirs].argmin()]) if len(theirs) else -1
        gap, more = (int(tokens[x] - tokens[y]), int(samples[x] - samples[y])) if y >= 0 else (0, 0)
        counts_hold = count[a] - more <= most_samples and count[b] + more <= most_samples
        if count[a] <= most_samples and 0 < gap and load[b] + gap <= most_tokens and counts_hold:
            destination[x], destination[y] = b, a
            load[a] -= gap
            load[b] += gap
            count[a] -= more
            count[b] += more
            continue
        s = int(mine[tokens[mine].argmin()])
        takers = np.flatnonzero((count + samples[s] <= most_samples) & (np.arange(size) != a))
        if not len(takers) or len(mine) == 1:
            return False
        b = int(takers[load[takers].argmin()])
        if load[b] + tokens[s] > most_tokens:
            return False
        destination[s] = b
        load[a] -= tokens[s]
        load[b] += tokens[s]
        count[a] -= samples[s]
        count[b] += samples[s]
    return False


def _place(world: WorldBatch, most_tokens: int, most_samples: int, *, first: Ints) -> Assignment | None:
    """The largest of `first` first, each on the rank with the fewest that has room for it; None if one finds none."""
    size, tokens, samples = world.world_size, world.num_tokens, _samples(world)
    load, count = np.zeros(size, np.int64), np.zeros(size, np.int64)
    destination = np.empty(len(tokens), np.int64)
    for s in np.argsort(-first, kind="stable").tolist():
        # An empty rank first, so that none stays empty.
        room = np.flatnonzero((count + samples[s] <= most_samples) & (load + tokens[s] <= most_tokens))
        if not len(room):
            return None
        r = room[np.lexsort((room, load[room], count[room] > 0))[0]]
        destination[s] = r
        load[r] += tokens[s]
        count[r] += samples[s]
    return destination
