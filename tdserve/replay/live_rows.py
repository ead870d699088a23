"""The set of row numbers that may be read, from which a row is drawn in constant time. Knows nothing of generations."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from tdserve.errors import LocalProtocolError

Rows = NDArray[np.int64]

_ABSENT = -1


class LiveRows:
    """A set of row numbers below a capacity; every operation is vectorised over the rows it is given.

    The members lie densely in an array, in no order; a second array says where each row's entry lies. Removing moves
    the last members into the gaps. Memory: 16 bytes per row of capacity.
    """

    def __init__(self, capacity: int) -> None:
        self._members: Rows = np.empty(capacity, np.int64)
        self._place: Rows = np.full(capacity, _ABSENT, np.int64)
        self._num = 0

    def __len__(self) -> int:
        return self._num

    def __repr__(self) -> str:
        return f"<LiveRows {self._num} of {len(self._place)}>"

    def add(self, rows: Rows) -> None:
        """Takes rows in, each once and none a member yet.

        Raises:
            LocalProtocolError: A row is a member already or named twice. Nothing was changed.
        """
        if np.count_nonzero(self._place[rows] != _ABSENT):
            raise LocalProtocolError(reason="a live row was made live again")
        end = self._num + len(rows)
        places = np.arange(self._num, end)
        self._place[rows] = places
        if np.count_nonzero(self._place[rows] != places):
            self._place[rows] = _ABSENT
            raise LocalProtocolError(reason="a row was made live twice at once")
        self._members[self._num : end] = rows
        self._num = end

    def remove(self, rows: Rows) -> None:
        """Drops rows, each once and all members.

        Raises:
            LocalProtocolError: A row is no member or named twice. Nothing was changed.
        """
        gaps = self._place[rows]
        if np.count_nonzero(gaps == _ABSENT):
            raise LocalProtocolError(reason="a row that is not live was removed")
        marks = np.arange(len(rows))
        self._place[rows] = marks
        if np.count_nonzero(self._place[rows] != marks):
            self._place[rows] = gaps
            raise LocalProtocolError(reason="a row was removed twice at once")
        self._place[rows] = _ABSENT
        left = self._num - len(rows)
        last = self._members[left : self._num]
        staying = last[self._place[last] != _ABSENT]
        gaps_below = gaps[gaps < left]
        self._members[gaps_below] = staying
        self._place[staying] = gaps_below
        self._num = left

    def draw(self, rng: np.random.Generator, num_rows: int) -> Rows:
        """Draws rows uniformly and independently, so that one may come twice. There must be a member."""
        return self._members[rng.integers(0, self._num, num_rows)]

    def contains(self, rows: Rows) -> NDArray[np.bool_]:
        """Which of these rows, each from 0 to the capacity, are members."""
        return np.not_equal(self._place[rows], _ABSENT)

    def rows(self) -> Rows:
        """All members, sorted; a copy."""
        return np.sort(self._members[: self._num])
