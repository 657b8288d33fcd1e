"""The plain way: every exchange where it is needed, with the training thread waiting for it.

What prioritized tables are compared with, bit for bit. It shares with them who owns a row and how gradients are added,
and nothing of what runs ahead.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fs_embed.peers import Peers
from fs_embed.route import BadId, Route, exchange_ids
from fs_embed.step import Step
from fs_embed.store import Store


class SynchronousLookup:
    def __init__(self, store: Store, peers: Peers, table_names: Sequence[str], *, divide_by: int) -> None:
        self.store, self.peers, self.table_names, self.divide_by = store, peers, table_names, divide_by
        self._step: Step | None = None
        self._routes: list[Route] = []
        self._num_exchanges = 0

    def forward(self, keys: Tensor, bad: BadId | None) -> Tensor:
        """`(n, D)` for `keys` `(n,)`: collective."""
        route, rows = self._fetch(keys, bad)
        if self._step is None or self._step.started:
            self._step, self._routes = Step(self._update), []
        self._routes.append(route)
        return self._step.look_up(keys, rows, route.inverse)

    def evaluate(self, keys: Tensor, bad: BadId | None) -> Tensor:
        route, rows = self._fetch(keys, bad)
        return rows.index_select(0, route.inverse)

    def prefetch(self, lookups: Any) -> None:
        """Nothing: synchronous tables look no batch ahead."""

    def flush(self) -> None:
        """Nothing: synchronous tables defer no update."""

    def reset(self) -> None:
        self._step = None

    def close(self) -> None:
        pass

    def stats(self) -> dict[str, float]:
        return {"exposed_wait_s": self.peers.wait_s, "bytes_sent": self.peers.bytes_sent, "hits": 0, "misses": 0}

    def _fetch(self, keys: Tensor, bad: BadId | None) -> tuple[Route, Tensor]:
        route = self._exchange(keys, bad)
        return route, route.to_askers(self.peers, self.store.read(route.slots))

    def _exchange(self, keys: Tensor, bad: BadId | None = None) -> Route:
        self._num_exchanges += 1
        return exchange_ids(self.peers, self.store.shards, keys, self.table_names, tag=self._num_exchanges, bad=bad)

    @torch.no_grad()
    def _update(self, step: Step) -> None:
        grads = step.all_grads()
        assert grads is not None, "a step without gradients is never closed here"
        route = self._routes[0] if len(self._routes) == 1 else self._exchange(step.all_keys())
        sums = route.sum_grads(grads) / self.divide_by
        received = route.to_owners(self.peers, sums)
        self.store.num_steps += 1
        self.store.update_(route.slots, received, self.store.num_steps)
