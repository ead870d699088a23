"""Numbers of a table that all processes share: with them a reader finds rows without a request to control.

They lie in the header of the table's generation file. All are int64, and each has one writer:

======  =======  ===================================================================
number  writer   meaning
======  =======  ===================================================================
0       control  1: rows may be read by number without a request
1       control  live rows from which on rows may be drawn so; 0: they never may
2       control  rows from this number on were never used
3       control  rows that are live
4       control  1: the store is a table
5       control  extends into claimed rows whose rows it has given up, since a retry was faster
6       control  rows that calls have sampled
8       control  the last of the writer's marks (9) whose rows are committed
9       writer   another mark for each extend into rows that it has claimed
16..    readers  rows that they have drawn by themselves, one number per reader
======  =======  ===================================================================

Only the generation of a row shows whether it is live. So a number that is a moment old makes no reader draw a row that
it may not have; at worst the reader asks control without need.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from tdserve.messages.row_numbers import Rows

NUM_NUMBERS = 496
"""Size of the array."""

MAX_WORKERS = 64
"""Data workers that may draw rows by themselves."""

NO_READER = 0
"""Place of a reader that draws no rows by itself, for there are more readers than places."""

_READABLE, _MIN_LIVE, _NUM_USED, _NUM_LIVE, _IS_TABLE, _GIVEN_UP, _SAMPLED = range(7)
_REPLAY, _QUEUE = 1, 2  # values of _IS_TABLE
_COMMITTED, _MARK = 8, 9  # a cache line away from numbers that seldom change
_FIRST_READER = 16

LOCAL_READERS = range(_FIRST_READER + MAX_WORKERS, NUM_NUMBERS)
"""Places of local clients."""

_MIN_LIVE_PART = 4
"""Readers draw by themselves if at least every fourth used row is live: they draw again what is not."""

_MAX_ROUNDS = 32
"""How often rows that are not live are replaced. If every fourth is live, one sample of 256 rows in 40 needs more."""


class UncommittedRows(NamedTuple):
    """Rows that were filled and are not committed yet, as of one moment.

    Attributes:
        rows: Their numbers.
        before: Their generations until they are committed.
        after: Their generations then.
        num_evicted: Live rows that they have taken the place of.
        num_given_up: As in :class:`SharedNumbers`.
    """

    rows: Rows
    before: Rows
    after: Rows
    num_evicted: int
    num_given_up: int


class FoundRows(NamedTuple):
    """Rows that a reader has found.

    Attributes:
        rows: Their numbers.
        generations: Their generations: after the copy the reader checks that they are still the same.
        before: Generations of rows that were not committed yet, 0 for the others; None: all were.
        num_given_up: As in :class:`SharedNumbers`, where some were not committed.
    """

    rows: Rows
    generations: Rows
    before: Rows | None = None
    num_given_up: int = 0

    def read_again(self, generations: Rows, shared: SharedNumbers) -> Rows:
        """Returns the generations that these rows have now, or will have as soon as they are committed."""
        found: Rows = generations[self.rows]
        if self.before is not None:
            is_same = found == self.before
            if shared.num_given_up == self.num_given_up:  # read last: what is given up may be filled again
                found[is_same] = self.generations[is_same]
        return found


def get_worker_place(number: int) -> int:
    """Returns the place of a data worker among the readers."""
    return _FIRST_READER + number if 0 <= number < MAX_WORKERS else NO_READER


class SharedNumbers:
    """The shared numbers of one table.

    Args:
        numbers: int64 ``[NUM_NUMBERS]``, mapped by all processes; by default in this process only.
    """

    def __init__(self, numbers: Rows | None = None) -> None:
        self._numbers: Rows = np.zeros(NUM_NUMBERS, np.int64) if numbers is None else numbers
        self._next_mark = 0

    # ------------------------------------------------------------ control's

    def permit(self, *, reads: bool, min_live: int, is_queue: bool = False) -> None:
        """Sets what readers may do without a request.

        Args:
            reads: Whether they may read rows by number.
            min_live: Live rows from which on they may draw rows; 0: they never may.
            is_queue: Whether rows are taken, and not sampled.
        """
        self._numbers[_READABLE], self._numbers[_MIN_LIVE] = reads, min_live
        self._numbers[_IS_TABLE] = _QUEUE if is_queue else _REPLAY

    @property
    def num_live(self) -> int:
        """Number of live rows."""
        return int(self._numbers[_NUM_LIVE])

    @num_live.setter
    def num_live(self, number: int) -> None:
        self._numbers[_NUM_LIVE] = number

    @property
    def num_sampled(self) -> int:
        """Number of rows that calls have sampled, ever. It outlives control, which is killed without a word."""
        return int(self._numbers[_SAMPLED])

    @num_sampled.setter
    def num_sampled(self, number: int) -> None:
        self._numbers[_SAMPLED] = number

    def set_used(self, number: int) -> None:
        """Sets the number from which on rows were never used."""
        self._numbers[_NUM_USED] = number

    def read_mark(self) -> int:
        """Returns the writer's last mark; all rows that it has filled by then are found after this call."""
        return int(self._numbers[_MARK])

    def note_committed(self, mark: int) -> None:
        """Shows that what was filled before this mark is committed."""
        self._numbers[_COMMITTED] = mark

    @property
    def num_given_up(self) -> int:
        """Number of extends into claimed rows whose rows were given up."""
        return int(self._numbers[_GIVEN_UP])

    def count_given_up(self) -> None:
        """Counts an extend whose rows are given up, before they are free."""
        self._numbers[_GIVEN_UP] += 1

    @property
    def num_drawn(self) -> int:
        """Number of rows that readers have drawn by themselves, ever."""
        return int(self._numbers[_FIRST_READER:].sum())

    # ------------------------------------------------------------ the writer's

    def make_mark(self) -> int:
        """Returns the next mark of this writer.

        No two marks are equal, whichever process makes them: a writer that was stopped may mark rows of an earlier
        claim.
        """
        self._next_mark = self._next_mark + 1 if self._next_mark else secrets.randbits(62)
        return self._next_mark

    def show_mark(self, mark: int) -> None:
        """Shows that this writer has filled rows by itself, after they are on record."""
        self._numbers[_MARK] = mark

    def mark_filled(self) -> None:
        """Shows that this writer has filled rows, with its next mark."""
        self.show_mark(self.make_mark())

    @property
    def uncommitted_mark(self) -> int | None:
        """The writers' last mark; None if all rows that were filled before it are committed."""
        mark = int(self._numbers[_MARK])
        return None if mark == self._numbers[_COMMITTED] else mark

    @property
    def committed_mark(self) -> int:
        """The last mark whose rows are committed."""
        return int(self._numbers[_COMMITTED])

    # ------------------------------------------------------------ a reader's

    @property
    def is_table(self) -> bool:
        """Whether they belong to a table; a store of another kind has none."""
        return bool(self._numbers[_IS_TABLE])

    @property
    def is_queue(self) -> bool:
        """Whether they belong to a table whose rows are taken."""
        return bool(self._numbers[_IS_TABLE] == _QUEUE)

    def find_listed(self, generations: Rows, rows: Rows) -> FoundRows | None:
        """Returns rows by their numbers; None if control must be asked, for example because one of them is not live."""
        if not self._numbers[_READABLE] or not len(rows) or rows.min() < 0 or rows.max() >= len(generations):
            return None
        found = generations[rows]
        return FoundRows(rows, found) if _are_live(found) else None

    def draw(
        self,
        generations: Rows,
        num_rows: int,
        *,
        rng: np.random.Generator,
        find_uncommitted: Callable[[SharedNumbers, Rows], UncommittedRows | None] = lambda *_: None,
    ) -> FoundRows | None:
        """Draws rows, each live row with the same probability; None if control must be asked.

        Args:
            generations: Generations of the table.
            num_rows: Rows to draw.
            rng: Source of randomness.
            find_uncommitted: Returns the rows that are not committed yet, if this process knows all of them. They are
                invisible here, although their writer has been promised that samples find them.
        """
        uncommitted = None
        if self.uncommitted_mark is not None:
            uncommitted = find_uncommitted(self, generations)
            if uncommitted is None:
                return None
        found = self._draw_committed(generations, num_rows, rng=rng)
        return found if found is None or uncommitted is None else self._mix_in_uncommitted(found, uncommitted, rng=rng)

    def _draw_committed(self, generations: Rows, num_rows: int, *, rng: np.random.Generator) -> FoundRows | None:
        numbers = self._numbers
        min_live, num_live, num_used = numbers[_MIN_LIVE], numbers[_NUM_LIVE], int(numbers[_NUM_USED])
        if not 0 < min_live <= num_live or not num_used <= num_live * _MIN_LIVE_PART:
            return None
        rows = _draw_numbers(num_used, num_rows, rng)
        found = generations[rows]
        for _ in range(_MAX_ROUNDS):
            if _are_live(found):
                return FoundRows(rows, found)
            missing = np.flatnonzero((found <= 0) | (found & 1 == 1))
            again = _draw_numbers(num_used, len(missing), rng)
            rows[missing], found[missing] = again, generations[again]
        return None

    def _mix_in_uncommitted(
        self, found: FoundRows, uncommitted: UncommittedRows, *, rng: np.random.Generator
    ) -> FoundRows:
        """Replaces as many of some drawn rows by uncommitted ones as gives each live row the same probability."""
        num_uncommitted = len(uncommitted.rows)
        if not num_uncommitted:
            return found
        num_committed = max(self.num_live - uncommitted.num_evicted, 0)  # control learns later what was evicted
        places = np.flatnonzero(rng.random(len(found.rows)) * (num_committed + num_uncommitted) < num_uncommitted)
        if not len(places):
            return found
        drawn = rng.integers(num_uncommitted, size=len(places))
        found.rows[places], found.generations[places] = uncommitted.rows[drawn], uncommitted.after[drawn]
        before = np.zeros_like(found.rows)
        before[places] = uncommitted.before[drawn]
        return FoundRows(found.rows, found.generations, before, uncommitted.num_given_up)

    def count_drawn(self, reader: int, num_rows: int) -> None:
        """Counts rows that a reader has drawn; one thread of it at a time.

        Args:
            reader: Its place.
            num_rows: Their number.
        """
        self._numbers[reader] += num_rows


def _draw_numbers(stop: int, num_drawn: int, rng: np.random.Generator) -> Rows:
    """Draws row numbers below ``stop``; in half the time of ``rng.integers``, with an error below one in 2**20 for a
    table of 2**33 rows."""
    return (rng.random(num_drawn) * stop).astype(np.int64)


def _are_live(generations: Rows) -> bool:
    """Returns whether all of these generations belong to live rows: above zero, and even.

    One pass over all bits takes a third of the time of one comparison per condition.
    """
    bits = int(np.bitwise_or.reduce(generations))
    return bits >= 0 and not bits & 1 and np.count_nonzero(generations) == len(generations)
