"""Which consumers have had which rows of a table."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from tdserve.base.errors import CapacityError
from tdserve.messages.row_numbers import NO_ROWS, PIECE_ROWS, Rows
from tdserve.rules.replay.eligibility.conditions import OWN
from tdserve.rules.replay.row_indexes.columns import RowColumns
from tdserve.rules.replay.settings import MAX_CONSUMERS


class Consumers:
    """A bit per row for each consumer of a table, in a column of it.

    Args:
        columns: Columns of the table.
        names: Those that have had rows, in the order of their bits.
        leaving: Those after which rows leave the table.

    Attributes:
        names: Those that have had rows, in the order of their bits.
    """

    def __init__(self, columns: RowColumns, names: Sequence[str], *, leaving: Sequence[str]) -> None:
        self._columns = columns
        self._leaving = leaving
        self.names = list(names)

    @property
    def _bits(self) -> NDArray[np.uint64]:
        return self._columns.get_array("consumed", np.uint64)

    def _get_bit(self, consumer: str) -> NDArray[np.uint64]:
        return np.asarray(1 << self.names.index(consumer), np.uint64)

    def prepare(self) -> None:
        """Makes the column before the first consumer is known; for very many rows, call it in a thread."""
        if not self.names:
            self._bits[:] = 0  # not in use elsewhere yet; the file gets its pages here, and not on the loop

    def learn(self, consumer: str) -> Iterator[None]:
        """Gives a consumer its bit if it has none, in steps.

        Raises:
            CapacityError: There are too many consumers.
        """
        if consumer == OWN or consumer in self.names:
            return
        if len(self.names) >= MAX_CONSUMERS:
            raise CapacityError(what=f"consumer {consumer!r} of one table", asked=len(self.names) + 1, free=0)
        bit = np.asarray(1 << len(self.names), np.uint64)
        for start in range(0, self._columns.capacity, PIECE_ROWS):
            # left by a consumer whose record a crash has cut off; the bit is unused before this consumer is known
            self._bits[start : start + PIECE_ROWS] &= ~bit
            yield
        self.names.append(consumer)

    def record(self, consumer: str, rows: Rows) -> None:
        """Marks rows, each named once, as had by a consumer. Raises CapacityError."""
        list(self.learn(consumer))  # at once
        self._bits[rows] |= self._get_bit(consumer)

    def reset(self, rows: Rows) -> None:
        """Marks rows as had by none."""
        if self.names:
            self._bits[rows] = 0

    def have_not_had(self, consumer: str, rows: Rows) -> NDArray[np.bool_]:
        """Returns which of the rows a consumer that has a bit has not had."""
        is_new: NDArray[np.bool_] = (self._bits[rows] & self._get_bit(consumer)) == 0
        return is_new

    def count_had(self, consumer: str, rows: Rows) -> int:
        """Returns how many of the rows a consumer has had."""
        return len(rows) - int(np.count_nonzero(self.have_not_had(consumer, rows))) if consumer in self.names else 0

    def select_had_by_all(self, rows: Rows, also: str = OWN) -> Rows:
        """Returns those of the rows that all consumers have had after which rows leave the table.

        Args:
            also: A consumer that counts as having had all of them.
        """
        if not self._leaving or not len(rows):
            return NO_ROWS
        others = [self._get_bit(consumer) for consumer in self._leaving if consumer != also]
        bits = np.bitwise_or.reduce(np.array(others, np.uint64))
        had_by_all: Rows = rows[(self._bits[rows] & bits) == bits]
        return had_by_all

    def count_backlog(self, contains: Callable[[slice], NDArray[np.bool_]]) -> dict[str, int]:
        """Returns how many rows each consumer has not had yet after which rows leave the table.

        Args:
            contains: Returns which rows of a piece count.
        """
        counts = dict.fromkeys(self._leaving, 0)
        if not counts:
            return counts
        # In pieces that fit into the processor's cache: a million rows at once take several times as long (measured).
        for start in range(0, self._columns.capacity, PIECE_ROWS):
            piece = slice(start, start + PIECE_ROWS)
            is_counted = contains(piece)
            if not is_counted.any():
                continue
            had = self._bits[piece]
            for consumer in counts:
                counts[consumer] += int(np.count_nonzero(is_counted & (had & self._get_bit(consumer) == 0)))
        return counts
