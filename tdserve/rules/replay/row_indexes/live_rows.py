"""The set of row numbers that may be read; a row is drawn from it in constant time. Independent of generations."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from tdserve.base.errors import LocalProtocolError
from tdserve.messages.row_numbers import Rows, is_run

_ABSENT = -1

_MIN_RUN = 512
"""Fewer rows than this are handled one by one, which is faster than finding out whether they are consecutive."""


def compact(rows: Rows) -> slice | Rows:
    """Returns the rows in the form that indexes arrays fastest: a slice if they are very many and consecutive, as those
    of most writers are. Indexing then returns a view."""
    if len(rows) < _MIN_RUN or int(rows[-1]) - int(rows[0]) != len(rows) - 1 or not is_run(rows):
        return rows
    return slice(int(rows[0]), int(rows[-1]) + 1)


class LiveRows:
    """A set of row numbers below a capacity; every operation is vectorised over its rows.

    The members lie densely in an array, in no order; a second array has the place of each row's entry. Removing moves
    the last members into the gaps. Memory: 16 bytes per row of capacity.
    """

    def __init__(self, capacity: int) -> None:
        # Filled at once: if a thread creates a very large table, it allocates the memory too.
        self._members: Rows = np.full(capacity, _ABSENT, np.int64)
        self._place: Rows = np.full(capacity, _ABSENT, np.int64)
        self._num = 0

    def __len__(self) -> int:
        return self._num

    def __repr__(self) -> str:
        return f"<LiveRows {self._num} of {len(self._place)}>"

    def add(self, rows: Rows) -> None:
        """Adds rows, each once and none a member yet.

        Raises:
            LocalProtocolError: A row is already a member, or named twice. Nothing was changed.
        """
        where = compact(rows)
        if np.count_nonzero(self._place[where] != _ABSENT):
            raise LocalProtocolError(reason="a live row was made live again")
        end = self._num + len(rows)
        places = np.arange(self._num, end)
        self._place[where] = places
        if not isinstance(where, slice) and np.count_nonzero(self._place[rows] != places):
            self._place[rows] = _ABSENT
            raise LocalProtocolError(reason="a row was made live twice at once")
        self._members[self._num : end] = rows
        self._num = end

    def remove(self, rows: Rows) -> None:
        """Removes rows, each once and all members.

        Raises:
            LocalProtocolError: A row is not a member, or named twice. Nothing was changed.
        """
        where = compact(rows)
        gaps = self._place[where]
        if np.count_nonzero(gaps == _ABSENT):
            raise LocalProtocolError(reason="a row that is not live was removed")
        if isinstance(where, slice):
            gaps = gaps.copy()
        else:
            marks = np.arange(len(rows))
            self._place[rows] = marks
            if np.count_nonzero(self._place[rows] != marks):
                self._place[rows] = gaps
                raise LocalProtocolError(reason="a row was removed twice at once")
        self._place[where] = _ABSENT
        left = self._num - len(rows)
        last = self._members[left : self._num]
        is_staying = self._place[compact(last)] != _ABSENT
        staying = _select(last, is_staying)
        gaps_below = compact(_select(gaps, gaps < left))
        self._members[gaps_below] = staying
        self._place[compact(staying)] = (
            np.arange(gaps_below.start, gaps_below.stop) if isinstance(gaps_below, slice) else gaps_below
        )
        self._num = left

    def select_members(self, rows: Rows) -> Rows:
        """Returns those of these rows that are members."""
        return _select(rows, self._place[compact(rows)] != _ABSENT)

    def draw(self, rng: np.random.Generator, num_rows: int) -> Rows:
        """Draws rows uniformly and independently, so a row may occur twice. There must be a member."""
        return self._members[rng.integers(0, self._num, num_rows)]

    def draw_others(self, rng: np.random.Generator, num_rows: int, *, num_drawn: int) -> Rows:
        """Draws different rows uniformly, none of them drawn by the ``num_drawn`` draws of this kind before it, if no
        others were made in between; members may have come and gone. There must be ``num_drawn + num_rows`` members.

        Rows that were drawn so lie in front. They are nowhere else: a row that goes is replaced by the last one.
        """
        end = num_drawn + num_rows
        places = num_drawn + rng.choice(self._num - num_drawn, num_rows, replace=False)
        drawn: Rows = self._members[places]
        ahead = self._members[num_drawn:end].copy()
        self._place[drawn] = _ABSENT
        staying = ahead[self._place[ahead] != _ABSENT]
        gaps = places[places >= end]
        self._members[gaps] = staying
        self._place[staying] = gaps
        self._members[num_drawn:end] = drawn
        self._place[drawn] = np.arange(num_drawn, end)
        return drawn

    def contains(self, rows: Rows | slice) -> NDArray[np.bool_]:
        """Returns which of these rows, each from 0 to the capacity, are members."""
        return np.not_equal(self._place[rows], _ABSENT)

    def get_rows(self) -> Rows:
        """Returns all members, sorted; a copy."""
        return np.sort(self._members[: self._num])


def _select(rows: Rows, is_chosen: NDArray[np.bool_]) -> Rows:
    """Returns ``rows[is_chosen]``; if all are chosen, which is usual, ``rows`` itself, which must not be changed."""
    return rows if np.count_nonzero(is_chosen) == len(rows) else rows[is_chosen]
