"""Rows that are unreadable while a write is applied to them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager

import numpy as np
from numpy.typing import NDArray

from tdserve.base.deadline import Deadline
from tdserve.messages.row_numbers import PIECE_ROWS
from tdserve.messages.row_sets import RowSet
from tdserve.rules.replay.live_rows import Rows
from tdserve.rules.replay.plans import no_rows
from tdserve.rules.replay.table import Table
from tdserve.server.opened_store import OpenedStore
from tdserve.server.sessions.session import ClientSession
from tdserve.server.turns import in_turns, over_pieces
from tdserve.structure.tree import Path


def do_nothing() -> None:
    """What follows where nothing does."""


class RowWriteHold:
    """The rows of a write, also of one that a crash has cut short: from here on nobody else's; odd after ``hold``.

    Args:
        entry: The store.
        rows: That are written, and by nobody else: see :func:`wait_for_others`.
        keys: Leaves or nodes that are written; none: all.

    Attributes:
        rows: As above.
        numbers: The same, of a table, from ``suspend`` or ``hold`` on.
    """

    def __init__(self, entry: OpenedStore, rows: RowSet, keys: Sequence[Path]) -> None:
        self._entry = entry
        self.rows = rows
        self._keys = keys
        self.numbers = no_rows()  # of a table, once they are needed
        self._num_suspended = 0
        entry.writes.append(rows)

    @property
    def next_version(self) -> int:
        """The content version of the store when they are readable again."""
        if self._entry.table is not None:
            return self._entry.content_version
        return self._entry.content_version + 1

    async def suspend(self) -> None:
        """Takes rows of a table out of every sample, some at a time: what takes long of ``hold``, or, where that is not
        to be, of ``resume``, one of which follows. They may still leave the table."""
        table = self._entry.table
        if table is not None:
            self.numbers = await numbers_of(self.rows)
            self._count_suspended(len(self.numbers))
            await in_turns(_in_steps(table, self.numbers, table.suspend))

    async def resume(self) -> None:
        """Ends ``suspend``, and that nobody else may write them."""
        table = self._entry.table
        if table is not None:
            await in_turns(_in_steps(table, self.numbers, table.resume))
            self._count_suspended(0)
        self.end()

    async def hold(self) -> None:
        """Makes them odd. Of a table within this turn, since its rows may leave it in any other."""
        entry = self._entry
        values = entry.generation_values()
        if entry.table is None:
            values[-1] |= 1  # the store's own number
            await over_pieces(self.rows, lambda piece: _make_odd(values, piece))
            return
        if len(self.numbers):  # suspended, and found live in this turn; those that were lost before are odd already
            entry.table.suspend(
                self.numbers[entry.table.selectors.contains(self.numbers)]
            )  # others that came meanwhile
            entry.table.ring.hold(self.numbers[values[self.numbers] & 1 == 0])
            self._count_suspended(0)
            return
        self.numbers = self.rows.rows
        try:
            entry.table.hold(self.numbers[values[self.numbers] & 1 == 0])
        except BaseException:
            self.end()
            raise

    async def let_go(self, *, is_written: bool, then: Callable[[], None] = do_nothing) -> None:
        """Makes them readable again, under their next generation; but for those that are lost.

        Args:
            then: Called when they are, before rows of a table may leave it, and before a sample has them.
        """
        entry = self._entry
        # Other leaves of a row may be lost.
        rows = self.rows - entry.lost.row_set if entry.lost else self.rows
        if entry.table is None:
            values = entry.generation_values()
            await over_pieces(rows, lambda piece: _count_up(values, piece))
            self.end()
            values[-1] = (values[-1] | 1) + 1
            values[-1] |= bool(entry.lost or entry.writes)
            then()
            return
        written = [number for key in self._keys or [()] for number in entry.numbers_of(key)] if is_written else []
        if entry.lost or not len(self.numbers):
            self.numbers = rows.rows
        try:
            self.numbers = entry.table.let_go(self.numbers, written)
            self._count_suspended(len(self.numbers))
            then()
        finally:
            await self.resume()

    def _count_suspended(self, num_rows: int) -> None:
        """So many of them are in no sample, though nobody holds them."""
        if self._entry.table is not None:
            self._entry.table.num_suspended += num_rows - self._num_suspended
            self._num_suspended = num_rows

    def end(self) -> None:
        """Nobody writes them any more; they stay unreadable."""
        self._entry.writes[:] = [rows for rows in self._entry.writes if rows is not self.rows]


@asynccontextmanager
async def holding(entry: OpenedStore, rows: RowSet, keys: Sequence[Path]) -> AsyncIterator[RowWriteHold]:
    """A block that checks a write and puts it on record; the rows are held in the turn in which it ends. Where it
    raises, nothing has become of them; so it must of a table whose rows are not all live. Arguments as of
    :class:`RowWriteHold`."""
    held = RowWriteHold(entry, rows, keys)
    try:
        await held.suspend()
        yield held
    except BaseException:
        await held.resume()
        entry.changed.wake()
        raise
    await held.hold()


async def numbers_of(rows: RowSet) -> Rows:
    """The numbers of a set, sorted."""
    return rows.rows if len(rows) <= PIECE_ROWS else await asyncio.to_thread(lambda: rows.rows)


def _in_steps(table: Table, rows: Rows, do: Callable[[Rows], None]) -> Iterator[None]:
    start = 0
    while start < len(rows):
        end = start + table.step_rows
        do(rows[start:end])
        start = end
        if start < len(rows):
            yield


def _make_odd(values: NDArray[np.int64], piece: slice | NDArray[np.int64]) -> None:
    values[piece] |= 1


def _count_up(values: NDArray[np.int64], piece: slice | NDArray[np.int64]) -> None:
    values[piece] += 1


def is_free(entry: OpenedStore, rows: RowSet) -> bool:
    """Whether nobody is writing one of these rows."""
    return not any(rows.overlaps(others) for others in entry.writes)


async def wait_for_others(session: ClientSession, entry: OpenedStore, rows: RowSet, deadline: Deadline) -> None:
    """Waits until nobody else is writing one of these rows. Whoever waited for them too may have them by now.

    Raises:
        DeadlineExceededError: Somebody still is: a local client, perhaps a stopped one.
    """
    if entry.writes:
        await session.wait(
            entry.changed,
            lambda: is_free(entry, rows) or None,
            deadline,
            lambda: f"the end of another write to rows of {entry.name!r}",
        )
