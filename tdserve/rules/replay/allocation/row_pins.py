"""Counts for each row how many holders keep it from being overwritten."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from tdserve.messages.row_numbers import Rows


class RowPins:
    """The pins of a table's rows; a row may have several. Every operation is vectorised over its rows.

    Args:
        capacity: Rows of the table, 2 bytes each; pages that are never written cost nothing.
    """

    def __init__(self, capacity: int) -> None:
        self._counts = np.zeros(capacity, np.int16)
        self._num_pinned = 0

    def __len__(self) -> int:
        """Returns the number of rows that have a pin."""
        return self._num_pinned

    def __repr__(self) -> str:
        return f"<RowPins of {self._num_pinned} rows>"

    def add(self, rows: Rows) -> None:
        """Adds a pin to each of these rows, each named once."""
        self._num_pinned += len(rows) - int(np.count_nonzero(self._counts[rows]))
        self._counts[rows] += 1

    def remove(self, rows: Rows) -> Rows:
        """Removes a pin from each of these rows, each named once and pinned; returns those that have none now."""
        self._counts[rows] -= 1
        loose: Rows = rows[self._counts[rows] == 0]
        self._num_pinned -= len(loose)
        return loose

    def drop(self, rows: Rows) -> None:
        """Removes all pins of these rows, each named once."""
        if self._num_pinned:
            self._num_pinned -= int(np.count_nonzero(self._counts[rows]))
            self._counts[rows] = 0

    def contains(self, rows: Rows | slice) -> NDArray[np.bool_]:
        """Returns which of these rows are pinned."""
        found: NDArray[np.bool_] = self._counts[rows] > 0
        return found
