"""Rows that this process has filled in its claim, and that control has not committed yet: its samples find them.

Without them each sample that follows an extend would wait for control. Only the claim of a sole writer is used so: then
no other process has filled rows of the table that are not committed.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from tdserve.messages.row_numbers import Rows
from tdserve.rules.replay.allocation.shared_numbers import SharedNumbers, UncommittedRows

_FIRST_ROWS = 1024
"""Rows for which there is room at first. Control commits them before there are many more."""


class _Extends:
    """Extends with consecutive marks, of which none has been given up.

    Args:
        first_mark: Mark of the first.
        num_given_up: As in ``SharedNumbers``.
        max_rows: Rows of all of them.
    """

    def __init__(self, first_mark: int, num_given_up: int, max_rows: int) -> None:
        self.first_mark = first_mark
        self.num_given_up = num_given_up
        # Their numbers, generations before and after the commit, and 1 for those in the place of a live row.
        self._rows = np.empty((4, max_rows), np.int64)
        self._ends = [0]

    @property
    def next_mark(self) -> int:
        """Mark of the extend that would follow."""
        return self.first_mark + len(self._ends) - 1

    def has_room(self, num_rows: int) -> bool:
        """Returns whether an extend of this many rows fits in."""
        return self._ends[-1] + num_rows <= self._rows.shape[1]

    def append(self, rows: Rows, before: Rows, after: Rows, has_evicted: NDArray[np.bool_]) -> None:
        """Adds an extend. Readers do not look at it before they see its mark."""
        begin = self._ends[-1]
        self._rows[:, begin : begin + len(rows)] = rows, before, after, has_evicted
        self._ends.append(begin + len(rows))

    def find(self, mark: int, committed_mark: int, generations: Rows) -> UncommittedRows | None:
        """Returns the rows up to a mark, without those that are committed; None if it is not a mark of these."""
        stop = mark - self.first_mark + 1
        if not 0 < stop < len(self._ends):
            return None
        found = self._rows[:, self._ends[self._count_committed(committed_mark, stop)] : self._ends[stop]]
        is_left = generations[found[0]] == found[1]
        if np.count_nonzero(is_left) != len(is_left):  # control commits rows before it shows that it has
            found = found[:, is_left]
        rows, before, after, has_evicted = found
        return UncommittedRows(rows, before, after, int(np.count_nonzero(has_evicted)), self.num_given_up)

    def make_room(self, committed_mark: int, num_rows: int) -> _Extends:
        """Returns these extends except those that are committed, with room for another one."""
        start = self._count_committed(committed_mark, len(self._ends) - 1)
        num_left = self._ends[-1] - self._ends[start]
        made = _Extends(self.first_mark + start, self.num_given_up, max(2 * num_left + num_rows, self._rows.shape[1]))
        made._rows[:, :num_left] = self._rows[:, self._ends[start] : self._ends[-1]]
        made._ends = [end - self._ends[start] for end in self._ends[start:]]
        return made

    def _count_committed(self, committed_mark: int, num_extends: int) -> int:
        """Counts the first extends that are committed. A mark outside of these is from before them, perhaps by
        another writer, whose marks may be greater."""
        number = committed_mark - self.first_mark + 1
        return number if 0 <= number <= num_extends else 0


class OwnUncommittedRows:
    """Those of one table. Threads: one writer at a time, any number of readers.

    Args:
        first_generation: Generation of a row after its first commit.
    """

    def __init__(self, first_generation: int) -> None:
        self._first_generation = first_generation
        self._extends: _Extends | None = None

    def mark_filled(self, shared: SharedNumbers, rows: Rows, before: Rows, hidden: Rows) -> None:
        """Shows all processes that rows were filled, and remembers them for samples of this process.

        Args:
            shared: The numbers of the table, to be written.
            rows: Their numbers.
            before: Their generations before they were claimed.
            hidden: Their generations now, which are odd.
        """
        mark, uncommitted_mark, num_given_up = shared.make_mark(), shared.uncommitted_mark, shared.num_given_up
        extends = self._extends
        if uncommitted_mark is None:
            extends = _Extends(mark, num_given_up, max(_FIRST_ROWS, len(rows)))
        elif extends is not None and (uncommitted_mark + 1 != extends.next_mark or mark != extends.next_mark):
            extends = None  # another process has filled rows, or this one without adding them
        elif extends is not None and not extends.has_room(len(rows)):
            extends = extends.make_room(shared.committed_mark, len(rows))
        if extends is not None and extends.num_given_up == num_given_up:
            after = hidden + 1
            after[hidden == 1] = self._first_generation
            extends.append(rows, hidden, after, (before > 0) & (before != hidden))
            self._extends = extends
        else:
            self.forget()
        shared.show_mark(mark)

    def forget(self) -> None:
        """Forgets all rows: their claim is over."""
        self._extends = None

    def find(self, shared: SharedNumbers, generations: Rows) -> UncommittedRows | None:
        """Returns the rows; None if there are some that this process does not know.

        Args:
            shared: The numbers of the table.
            generations: Generations of all its rows.
        """
        extends, mark = self._extends, shared.uncommitted_mark
        if extends is None or mark is None or shared.num_given_up != extends.num_given_up:
            return None
        return extends.find(mark, shared.committed_mark, generations)
