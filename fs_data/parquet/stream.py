"""One source's rows in the order in which one reader reads them, in portions of any size."""

from collections.abc import Iterator

from fs_data.parquet.columns import Column, rows
from fs_data.parquet.reader import Part


class Stream:
    """Cuts parts, as they are read, into portions, and knows the position after each."""

    def __init__(self, parts: Iterator[Part], position: int) -> None:
        self._parts = parts
        self._part: Part | None = None
        self._start = position  # of the part, in the reader's hand
        self._used = 0  # rows of the part

    @property
    def position(self) -> int:
        """Rows of the hand up to the first that is not given yet; rows that were left out between them included."""
        if self._part is None:
            return self._start
        kept = self._part.rows
        return self._start + (int(kept[self._used]) if self._used < len(kept) else self._part.piece_rows)

    def has_rows(self) -> bool:
        """Reads on until there is a row to give."""
        while self._part is None or self._used == len(self._part.rows):
            self._start, self._used = self.position, 0
            self._part = None  # lets go of its memory before more is read
            self._part = next(self._parts, None)
            if self._part is None:
                return False
        return True

    def take(self, num_rows: int) -> Iterator[tuple[dict[str, Column], int]]:
        """The next `num_rows` rows, or fewer at the end, in parts with their number of rows."""
        while num_rows and self.has_rows():
            assert self._part is not None
            taken = min(num_rows, len(self._part.rows) - self._used)
            stop = self._used + taken
            portion = {name: rows(column, self._used, stop) for name, column in self._part.columns.items()}
            self._used = stop
            num_rows -= taken
            yield portion, taken
