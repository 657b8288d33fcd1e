"""Which rows each reader reads: row groups go round, and are cut only where readers would end far apart. Pure.

A reader is one worker of one rank. Dealing groups in turn keeps the readers at about the same place of the files, and
so at about the same time where rows are in order of time.
"""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, order=True, slots=True)
class Piece:
    """Rows `start` to `stop` of one row group."""

    group: int
    """Counts the groups of all files, in order."""
    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start


def deal(
    group_rows: Sequence[int], num_readers: int, *, spread: int, order: Sequence[int] | None = None
) -> list[list[Piece]]:
    """Each reader's pieces, in the order in which it reads them; every row is in one piece.

    Args:
        group_rows: Rows of each group.
        spread: Totals of two readers may differ by this many rows before groups are cut.
        order: Groups in the order in which they are dealt; None keeps that of the files.
    """
    hands: list[list[Piece]] = [[] for _ in range(num_readers)]
    sequence = range(len(group_rows)) if order is None else order
    for turn, group in enumerate(g for g in sequence if group_rows[g]):
        hands[turn % num_readers].append(Piece(group, 0, group_rows[group]))
    totals = [sum(map(len, hand)) for hand in hands]
    if max(totals) - min(totals) > spread:
        _level(hands, totals)
    return hands


def _level(hands: list[list[Piece]], totals: list[int]) -> None:
    """Readers with more than their share give the rows that they would read last to those with less."""
    least, extra = divmod(sum(totals), len(totals))
    by_total = sorted(range(len(totals)), key=lambda r: (-totals[r], r))
    share = dict.fromkeys(range(len(totals)), least)
    for r in by_total[:extra]:
        share[r] += 1
    spare: list[Piece] = []
    for r in range(len(totals)):
        surplus = totals[r] - share[r]
        while surplus > 0:
            last = hands[r].pop()
            given = min(surplus, len(last))
            spare.append(Piece(last.group, last.stop - given, last.stop))
            if given < len(last):
                hands[r].append(Piece(last.group, last.start, last.stop - given))
            surplus -= given
    spare.sort(reverse=True)
    for r in range(len(totals)):
        missing = share[r] - totals[r]
        while missing > 0:
            piece = spare.pop()
            taken = min(missing, len(piece))
            hands[r].append(Piece(piece.group, piece.start, piece.start + taken))
            if taken < len(piece):
                spare.append(Piece(piece.group, piece.start + taken, piece.stop))
            missing -= taken
