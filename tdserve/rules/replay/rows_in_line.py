"""Rows that the next writers get before the cursor of a ring goes on."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from tdserve.messages.row_numbers import NO_ROWS, Rows


class RowsInLine:
    """Holes, then rows whose promise has ended; the oldest first.

    They are kept in pieces: giving rows up one by one must not copy the others.

    Attributes:
        num_holes: Number of holes.
    """

    def __init__(self) -> None:
        self.num_holes = 0
        self._holes: deque[Rows] = deque()
        self._overdue: deque[tuple[Rows, Rows]] = deque()

    @property
    def is_empty(self) -> bool:
        """Whether no row is in line."""
        return not self.num_holes and not self._overdue

    def add_holes(self, rows: Rows) -> None:
        """Adds rows that were given up."""
        if len(rows):
            self._holes.append(rows)
            self.num_holes += len(rows)

    def take_holes(self, num_rows: int) -> Rows:
        """Takes up to ``num_rows`` holes."""
        if not self.num_holes:
            return NO_ROWS
        found: list[Rows] = []
        missing = min(num_rows, self.num_holes)
        self.num_holes -= missing
        while missing:
            piece = self._holes.popleft()
            if len(piece) > missing:
                self._holes.appendleft(piece[missing:])
                piece = piece[:missing]
            found.append(piece)
            missing -= len(piece)
        return found[0] if len(found) == 1 else np.concatenate(found)

    def put_first(self, row: int) -> None:
        """Puts the holes with numbers from ``row`` on before the others."""
        behind = [piece[piece >= row] for piece in self._holes]
        ahead = [piece[piece < row] for piece in self._holes]
        self._holes = deque(piece for piece in (*behind, *ahead) if len(piece))

    def add_overdue(self, rows: Rows, row_ids: Rows) -> None:
        """Adds rows whose promise has ended, which may be live or never used.

        Args:
            rows: Their numbers.
            row_ids: What identifies the rows of now.
        """
        if len(rows):
            self._overdue.append((rows, row_ids))

    def take_overdue(
        self, num_rows: int, get_row_ids: Callable[[Rows], Rows], is_taken: Callable[[Rows], NDArray[np.bool_]]
    ) -> Rows:
        """Takes up to ``num_rows`` overdue rows, without those that have left the table meanwhile.

        Args:
            num_rows: Most rows.
            get_row_ids: Returns what identifies the rows of now.
            is_taken: Returns which rows no other writer may have.
        """
        found: list[Rows] = []
        while num_rows and self._overdue:
            piece, row_ids = self._overdue.popleft()
            is_next = (get_row_ids(piece) == row_ids) & ~is_taken(piece)
            piece, row_ids = piece[is_next], row_ids[is_next]
            if len(piece) > num_rows:
                self._overdue.appendleft((piece[num_rows:], row_ids[num_rows:]))
                piece = piece[:num_rows]
            found.append(piece)
            num_rows -= len(piece)
        return np.concatenate(found) if found else NO_ROWS
