"""Rows that the next writers get before the cursor of a ring continues."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tdserve.messages.row_numbers import NO_ROWS, Rows

PIECE_ROWS = 65_536
"""Most rows of a piece. To look at all rows of a large table at once would keep the event loop busy."""


class _HolePiece(NamedTuple):
    """Some holes, in order.

    Attributes:
        low, high: The least and the greatest of them, or less and more.
    """

    rows: Rows
    low: int
    high: int


class RowsInLine:
    """Holes, then rows whose promise has ended; the oldest first.

    They are kept in pieces: giving rows up one by one must not copy the others.

    Attributes:
        num_holes: Number of holes.
    """

    def __init__(self) -> None:
        self.num_holes = 0
        self._holes: deque[_HolePiece] = deque()
        self._overdue: deque[tuple[Rows, Rows]] = deque()

    @property
    def is_empty(self) -> bool:
        """Whether no row is in line."""
        return not self.num_holes and not self._overdue

    def add_holes(self, rows: Rows) -> None:
        """Adds rows that were given up."""
        for first in range(0, len(rows), PIECE_ROWS):
            piece = rows[first : first + PIECE_ROWS]
            self._holes.append(_HolePiece(piece, int(piece.min()), int(piece.max())))
        self.num_holes += len(rows)

    def take_holes(self, num_rows: int) -> Rows:
        """Takes up to ``num_rows`` holes."""
        if not self.num_holes:
            return NO_ROWS
        found: list[Rows] = []
        missing = min(num_rows, self.num_holes)
        self.num_holes -= missing
        while missing:
            piece, low, high = self._holes.popleft()
            if len(piece) > missing:
                self._holes.appendleft(_HolePiece(piece[missing:], low, high))
                piece = piece[:missing]
            found.append(piece)
            missing -= len(piece)
        return found[0] if len(found) == 1 else np.concatenate(found)

    def put_first(self, row: int) -> None:
        """Puts the holes with numbers from ``row`` on before the others."""
        behind, ahead = list[_HolePiece](), list[_HolePiece]()
        for piece in self._holes:
            if piece.low >= row or piece.high < row:
                (behind if piece.low >= row else ahead).append(piece)
                continue
            is_behind = piece.rows >= row
            behind.append(_HolePiece(piece.rows[is_behind], row, piece.high))
            ahead.append(_HolePiece(piece.rows[~is_behind], piece.low, row - 1))
        self._holes = deque(piece for piece in (*behind, *ahead) if len(piece.rows))

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
