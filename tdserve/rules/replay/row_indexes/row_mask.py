"""A set of row numbers as one byte per row: the cheapest one to change and to ask. Nothing is drawn from it."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from tdserve.base.errors import LocalProtocolError
from tdserve.messages.row_numbers import RUN_PIECE_ROWS, Rows
from tdserve.rules.replay.row_indexes.live_rows import compact


class RowMask:
    """A set of row numbers below a capacity. To draw from a set, see
    :class:`~tdserve.rules.replay.row_indexes.live_rows.LiveRows`.

    Args:
        capacity: Number of rows.
    """

    def __init__(self, capacity: int) -> None:
        self._is_member = np.zeros(capacity, np.bool_)

    def add(self, rows: Rows) -> None:
        """Adds rows.

        Raises:
            LocalProtocolError: A row is already a member. Nothing was changed.
        """
        where = compact(rows)
        if np.count_nonzero(self._is_member[where]):
            raise LocalProtocolError(reason="a live row was made live again")
        self._is_member[where] = True

    def remove(self, rows: Rows) -> None:
        """Removes those rows that are members."""
        self._is_member[compact(rows)] = False

    def select_members(self, rows: Rows) -> Rows:
        """Returns those of these rows that are members; if all are, which is usual, the array itself."""
        is_member = self._is_member[compact(rows)]
        return rows if np.count_nonzero(is_member) == len(rows) else rows[is_member]

    def contains(self, rows: Rows | slice) -> NDArray[np.bool_]:
        """Returns which of these rows, each from 0 to the capacity, are members; a copy."""
        return np.array(self._is_member[rows])

    def get_first_rows(self, max_rows: int) -> Rows:
        """Returns the first members in the order of their numbers, at most ``max_rows``."""
        found = [np.empty(0, np.int64)]
        missing = max_rows
        for start in range(0, len(self._is_member), RUN_PIECE_ROWS):
            if missing <= 0:
                break
            found.append(start + np.flatnonzero(self._is_member[start : start + RUN_PIECE_ROWS])[:missing])
            missing -= len(found[-1])
        return np.concatenate(found)

    def get_rows(self) -> Rows:
        """Returns all members, sorted."""
        return np.flatnonzero(self._is_member)

    def get_rows_of(self, piece: range) -> Rows:
        """Returns the members among consecutive rows, sorted."""
        return np.flatnonzero(self._is_member[piece.start : piece.stop]) + piece.start


class SuspendedRows(RowMask):
    """Rows of a table that may not be drawn while a part of them is written, and count as what they are all the same.

    While there are none, which is usual, rows that come and leave cost nothing.
    """

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._num_rows = 0

    def __len__(self) -> int:
        return self._num_rows

    def add(self, rows: Rows) -> None:
        """Adds rows, each named once; errors as in ``RowMask``."""
        super().add(rows)
        self._num_rows += len(rows)

    def remove(self, rows: Rows) -> None:
        """Removes those rows, each named once, that are members."""
        if self._num_rows:
            rows = self.select_members(rows)
            super().remove(rows)
            self._num_rows -= len(rows)
