"""Rows of a table that may not be drawn while a part of them is written, and count as what they are all the same."""

from __future__ import annotations

from tdserve.messages.row_numbers import Rows
from tdserve.rules.replay.row_indexes.row_mask import RowMask


class SuspendedRows(RowMask):
    """The suspended rows of one table. While there are none, which is usual, rows that come and leave cost nothing."""

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
