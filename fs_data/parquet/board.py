"""The few numbers that a dataset's copies in worker processes share with the one that the training process holds."""

from dataclasses import dataclass
from typing import Literal

import torch

Count = Literal["rows_read", "rows_skipped", "groups_skipped", "retries"]

MAX_WORKERS = 1024
_COUNTS: tuple[Count, ...] = ("rows_read", "rows_skipped", "groups_skipped", "retries")


@dataclass(frozen=True, kw_only=True, slots=True)
class ParquetStats:
    """What this rank's readers met, all workers together, since the dataset was made."""

    rows_read: int
    """Including those that a predicate left out."""
    rows_skipped: int
    """Left out by `on_error="skip"`."""
    groups_skipped: int
    """Row groups that could not be read; their rows count as skipped."""
    files_skipped: int
    """Files that had no readable footer, or did not fit to the others; their rows are not known."""
    retries: int
    skew_rows: int
    """Most rows of the files between two readers in the same step; 0 before the first pass, and with `shuffle`."""


class Board:
    """Shared memory: persistent workers see the epoch that the training process sets, and it sees their counts."""

    def __init__(self) -> None:
        # Each worker writes its own row alone, so nothing is locked: (was resumed, counts …).
        self._rows = torch.zeros(MAX_WORKERS + 1, 1 + len(_COUNTS), dtype=torch.int64).share_memory_()

    @property
    def epoch(self) -> int:
        return int(self._rows[MAX_WORKERS, 0])

    @epoch.setter
    def epoch(self, epoch: int) -> None:
        self._rows[MAX_WORKERS, 0] = epoch

    @property
    def skew_rows(self) -> int:
        return int(self._rows[MAX_WORKERS, 1])

    @skew_rows.setter
    def skew_rows(self, num_rows: int) -> None:
        self._rows[MAX_WORKERS, 1] = num_rows

    def offer_resume(self, worker: int | None) -> None:
        """The next pass of `worker`, or of each worker, goes on from where the state stands."""
        self._rows[slice(0, MAX_WORKERS) if worker is None else worker, 0] = 1

    def withdraw_resume(self) -> None:
        self._rows[:MAX_WORKERS, 0] = 0

    def take_resume(self, worker: int) -> bool:
        """Whether this pass of `worker` is the one to resume; later ones are whole."""
        resumes = bool(self._rows[worker, 0])
        self._rows[worker, 0] = 0
        return resumes

    def count(self, worker: int, what: Count, amount: int) -> None:
        self._rows[worker, 1 + _COUNTS.index(what)] += amount

    def stats(self, files_skipped: int) -> ParquetStats:
        sums = self._rows[:MAX_WORKERS, 1:].sum(0).tolist()
        return ParquetStats(
            **dict(zip(_COUNTS, sums, strict=True)), files_skipped=files_skipped, skew_rows=self.skew_rows
        )
