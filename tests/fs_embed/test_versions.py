"""Tables that check versions find a row that was read too early, on every rank; and find none where all is well."""

import unittest.mock
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import fs_embed
from fs_embed.prioritized import PrioritizedEngine
from fs_embed.route import Route
from tests.fs_embed.training import train
from tests.ranks import RankPool


class OverlooksOthers(PrioritizedEngine):
    """A row counts as shared only where one rank holds it in both batches: what others write to it goes unseen."""

    def _shared(self, route: Route, other: Route) -> Tensor:
        n = self.store.shards.num_slots
        return torch.isin(route.slots + n * route.asker, other.slots + n * other.asker)


class ReadsBeforeDeferred(PrioritizedEngine):
    """The deferred update of a step comes after the rows for the step after the next were read."""

    late: Callable[[], None] | None = None

    def _apply_deferred(self, *args: Any) -> None:
        self.late = lambda: PrioritizedEngine._apply_deferred(self, *args)

    def _open(self, *args: Any) -> None:
        super()._open(*args)
        if self.late is not None:
            self.late()
            self.late = None


def _train_checked(engine: type[PrioritizedEngine], optimizer: fs_embed.optim.RowOptimizer) -> str:
    with unittest.mock.patch("fs_embed.tables.PrioritizedEngine", engine):
        try:
            train("prioritized", optimizer, check_versions=True)
        except fs_embed.StaleRow as error:
            return str(error)
    return ""


def test_a_row_that_was_read_before_others_wrote_it_is_found(ranks: Callable[[int], RankPool]) -> None:
    errors = ranks(3).run(_train_checked, OverlooksOthers, fs_embed.SGD(lr=0.05))
    assert all(errors), errors
    assert any("of table 'table'; please report" in text for text in errors)


def test_a_row_that_was_read_before_a_deferred_update_is_found(ranks: Callable[[int], RankPool]) -> None:
    errors = ranks(2).run(_train_checked, ReadsBeforeDeferred, fs_embed.SGD(lr=0.05))
    assert all(errors), errors


def _with_and_without() -> bool:
    optimizer = fs_embed.Adagrad(lr=0.1)
    checked = train("prioritized", optimizer, num_lookups=2, announce="odd", check_versions=True)
    plain = train("prioritized", optimizer, num_lookups=2, announce="odd")
    return checked.losses == plain.losses and torch.equal(checked.table, plain.table)


def test_checking_finds_nothing_where_nothing_is_stale_and_changes_no_bit(ranks: Callable[[int], RankPool]) -> None:
    assert all(ranks(1).run(_with_and_without))
    assert all(ranks(2).run(_with_and_without))
