"""Which rows each reader reads: row groups go round, and are cut only where readers would end far apart. Pure.

A reader is one worker of one rank. Dealing groups in turn keeps the readers at about the same place of the files, and
so at about the same time where rows are in order of time.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, order=True, slots=True)
class Piece:
    """Rows `start` to `stop` of one row group, in the order in which an epoch reads the group."""

    group: int
    """Counts the groups of all files, in order."""
    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class Round:
    """How far a number of readers came, before others took over."""

    num_readers: int
    spread: int
    positions: tuple[int, ...]
    """Rows of its hand that each reader was done with."""


def deal(pieces: Sequence[Piece], num_readers: int, *, spread: int) -> list[list[Piece]]:
    """Each reader's pieces, in the order in which it reads them; every row is in one piece.

    Args:
        pieces: In the order in which they are dealt.
        spread: Totals of two readers may differ by this many rows before groups are cut.
    """
    hands: list[list[Piece]] = [[] for _ in range(num_readers)]
    for turn, piece in enumerate(p for p in pieces if len(p)):
        hands[turn % num_readers].append(piece)
    totals = [sum(map(len, hand)) for hand in hands]
    if max(totals) - min(totals) > spread:
        _level(hands, totals)
        turn = _turns(pieces)
        return [_in_order(hand, turn) for hand in hands]
    return hands


def rest_of(hand: Sequence[Piece], position: int) -> list[Piece]:
    """`hand` without its first `position` rows."""
    rest: list[Piece] = []
    for piece in hand:
        done = min(position, len(piece))
        position -= done
        if done < len(piece):
            rest.append(Piece(piece.group, piece.start + done, piece.stop))
    return rest


def rest_after(pieces: Sequence[Piece], rounds: Sequence[Round]) -> list[Piece]:
    """What is left of `pieces`, in their order, after all `rounds` of readers."""
    turn = _turns(pieces)
    rest = list(pieces)
    for r in rounds:
        hands = deal(rest, r.num_readers, spread=r.spread)
        rest = _in_order([p for hand, done in zip(hands, r.positions, strict=True) for p in rest_of(hand, done)], turn)
    return rest


def time_skew(hands: Sequence[Sequence[Piece]], group_rows: Sequence[int], batch_size: int) -> int:
    """Most rows of the files between two readers in the same step: how far apart in time a global batch can be."""
    firsts = np.concatenate(([0], np.cumsum(group_rows)))
    at: list[np.ndarray] = []  # of each reader: where in the files each of its batches begins
    for hand in hands:
        lengths = np.array([len(p) for p in hand], np.int64)
        starts = np.array([firsts[p.group] + p.start for p in hand], np.int64)
        before = np.concatenate(([0], np.cumsum(lengths)))
        steps = np.arange(0, before[-1], batch_size)
        piece = np.searchsorted(before, steps, side="right") - 1
        at.append(starts[piece] + steps - before[piece] if len(hand) else steps)
    skew = 0
    for step in range(max(map(len, at))):
        here = [a[step] for a in at if step < len(a)]
        skew = max(skew, int(max(here) - min(here)))
    return skew


def _turns(pieces: Sequence[Piece]) -> dict[int, int]:
    """When each group comes in the epoch."""
    return {piece.group: i for i, piece in reversed(list(enumerate(pieces)))}


def _in_order(pieces: Sequence[Piece], turn: Mapping[int, int]) -> list[Piece]:
    """By groups' turns, and neighbours as one."""
    joined: list[Piece] = []
    for piece in sorted(pieces, key=lambda p: (turn[p.group], p.start)):
        if joined and joined[-1].group == piece.group and joined[-1].stop == piece.start:
            joined[-1] = Piece(piece.group, joined[-1].start, piece.stop)
        else:
            joined.append(piece)
    return joined


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
