"""The order in which rows were committed, and which of them continue the row before theirs.

A *sequence* is twice the place of a row in the order of commits. It is odd, one more, unless the row before it in the
ring (its number less 1) was the last row of the same writer when it came. So one column, which is checked after a loss
of power, has both: greater is newer, and an even one continues.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from tdserve.messages.row_numbers import Rows
from tdserve.rules.replay.row_indexes.columns import RowColumns

MAX_WRITERS = 4096
"""Writers whose last row is known. A row of another one, which has not written for the longest, continues none."""

NO_SEQUENCE = 1
"""Sequence before the first row: no row has a lower one."""

_Place = TypeVar("_Place", int, Rows)


def to_place(sequence: _Place) -> _Place:
    """Returns the places in the order of commits, from 1 on, of rows with these sequences."""
    return sequence >> 1


def to_last_sequence(num_rows: int) -> int:
    """Returns the highest sequence that the last of this many rows may have."""
    return 2 * num_rows + NO_SEQUENCE


class RowOrder:
    """Gives rows their sequences, and finds those that continue others. Threads: not safe.

    Which row was a writer's last is forgotten with the process: then its next row continues none.

    Args:
        columns: Columns of the table.
        last_sequence: Highest sequence that any row may have.

    Attributes:
        last_sequence: Highest sequence so far.
    """

    def __init__(self, columns: RowColumns, last_sequence: int) -> None:
        self.last_sequence = last_sequence | 1  # odd, so that the next one begins at an even one
        self._sequence = columns.sequence
        self._capacity = columns.capacity
        self._tails: dict[Hashable, tuple[int, int]] = {}  # last row of each writer and its sequence, oldest first

    def append(self, rows: Rows, where: slice | Rows, writers: Sequence[tuple[Hashable, int]]) -> None:
        """Gives rows the next sequences.

        Args:
            rows: Their numbers, in the order of their commits; at least one.
            where: The same rows, as an index of columns.
            writers: Their writers, in the order of the rows, and how many rows each has.
        """
        begin = self.last_sequence + 1
        self.last_sequence += 2 * len(rows)
        found = np.arange(begin, self.last_sequence + 1, 2)
        if len(rows) > 1 and not isinstance(where, slice):
            found[1:] += (np.diff(rows) - 1) % self._capacity != 0
        self._sequence[where] = found
        start = 0
        for writer, num_rows in writers:
            first, last = int(rows[start]), int(rows[start + num_rows - 1])
            is_next = self._is_tail(writer, (first - 1) % self._capacity)
            self._sequence[first] = begin + 2 * start + (not is_next)
            self._tails[writer] = last, int(self._sequence[last])
            start += num_rows
        while len(self._tails) > MAX_WRITERS:
            del self._tails[next(iter(self._tails))]

    def find_continuing(self, rows: Rows) -> NDArray[np.bool_]:
        """Returns which of these live rows were written right after the row before theirs in the ring, by its
        writer."""
        own, before = self._sequence[rows], self._sequence[rows - 1]  # that of row 0 is the last one
        found: NDArray[np.bool_] = (own & 1 == 0) & (before < own)
        return found

    def _is_tail(self, writer: Hashable, row: int) -> bool:
        """Returns whether a row is the last one of a writer, and still that one; it is not from now on."""
        last, sequence = self._tails.pop(writer, (None, 0))
        return last == row and int(self._sequence[row]) == sequence
