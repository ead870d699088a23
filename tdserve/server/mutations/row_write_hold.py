"""The rows of a write, which are unreadable while it is applied to them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from tdserve.base.deadline import Deadline
from tdserve.messages.row_numbers import Rows
from tdserve.messages.row_sets import RowSet
from tdserve.rules.replay.table import Table
from tdserve.server.execution.turns import call_in_turns
from tdserve.server.open_store.opened_store import OpenedStore
from tdserve.server.sessions.client_session import ClientSession
from tdserve.structure.trees.tree import Path

Check = Callable[[Rows, slice], None]
"""Checks some rows of a write, given with their positions among all its rows; raises if they cannot be written."""


def do_nothing(*_: object) -> None:
    """Does nothing: the default of calls that are optional."""


async def _compare_nothing() -> None:
    pass


@dataclass(frozen=True)
class RowDemands:
    """What a write demands of its rows.

    Attributes:
        check: Checks some of them, of a table.
        compare: Compares what they have now, while they are held; raises if they cannot be written.
    """

    check: Check = do_nothing
    compare: Callable[[], Awaitable[None]] = _compare_nothing


NO_DEMANDS = RowDemands()


class RowWriteHold:
    """The rows of a write, also of one that a crash has interrupted. No other write may have them; after ``hide`` their
    generations are odd.

    Rows of a table are held from before the write is on record until its record is deleted: no sample gets them, and no
    writer. They may leave the table all the while. A write of very many rows handles some in each turn of the event
    loop.

    Args:
        store: The store.
        rows: Rows that are written; no other write may have them: see :func:`wait_for_others`.
        keys: Leaves or nodes that are written; none: all.

    Attributes:
        rows: As above.
    """

    def __init__(self, store: OpenedStore, rows: RowSet, keys: Sequence[Path]) -> None:
        self._store = store
        self.rows = rows
        self._keys = keys
        self._held_before = RowSet.run(0, 0)  # rows of a table that were held already, such as lost ones
        self._num_held = 0
        store.writes.append(rows)

    @property
    def next_version(self) -> int:
        """The content version of the store once the rows are readable again."""
        if self._store.table is not None:
            return self._store.content_version
        generations = self._store.generations
        return 1 if generations is None else generations.next_content_version

    async def hold(self, wanted: RowDemands = NO_DEMANDS) -> None:
        """Holds rows of a table. In the turn in which it returns, all of them are live and can be written.

        Raises:
            SelectionError: A row is not live, or what the demands raise. No row is held then, and others may write
                them.
        """
        try:
            if self._store.table is None:
                await wanted.compare()
            else:
                await self._hold_rows(self._store.table, wanted)
        except BaseException:
            await self.give_back()
            raise

    async def _hold_rows(self, table: Table, wanted: RowDemands) -> None:
        def hold(rows: Rows) -> None:
            self._num_held += len(table.state.hold(rows))

        num_left, self._held_before = table.ring.num_left_held, table.ring.select_held(self.rows)
        await look_at_rows(table, self.rows, wanted.check, hold)
        await wanted.compare()
        while num_left != table.ring.num_left_held:  # one of the rows may have left since it was checked
            num_left = table.ring.num_left_held
            await look_at_rows(table, self.rows, wanted.check)

    async def give_back(self) -> None:
        """Undoes ``hold``; other writes may have the rows."""
        if self._store.table is not None:
            await call_in_turns(self._iter_held_rows(self._store.table), self._store.table.state.let_go)
        self.end()
        self._store.waiters.wake()

    def _iter_held_rows(self, table: Table) -> Iterator[Rows]:
        """Yields the rows that ``hold`` itself has held so far: the first of those that were not held before."""
        num_missing = self._num_held
        for rows in table.state.iter_steps((self.rows - self._held_before).iter_pieces()):
            if not num_missing:
                return
            yield rows[:num_missing]
            num_missing -= min(num_missing, len(rows))

    async def hide(self, *, with_rows: bool = True) -> None:
        """Makes the rows odd (rows of a table are held before): the write is decided, and begins now.

        Args:
            with_rows: False: only the number of a tensordict store itself, of which nothing but a lock changes.
        """
        values, table = self._store.get_generation_values(), self._store.table
        if table is None:
            values[-1] |= 1  # the store's own number
            if with_rows:
                await call_in_turns(self.rows.iter_pieces(), lambda piece: _make_odd(values, piece))
        else:
            await call_in_turns(table.state.iter_steps(self.rows.iter_pieces()), table.ring.hide)

    async def let_go(
        self, *, is_written: bool, is_untouched: bool = False, then: Callable[[], None] = do_nothing
    ) -> None:
        """Makes the rows readable again, under their next generation, except those that are lost.

        Args:
            is_written: Whether the write was applied to them.
            is_untouched: Whether not a byte of them was written. Then they get back their last generation, of which
                the sync has the checksum: a damaged one does not become whole.
            then: Called once they are readable, before another writer or a sample may have rows of a table.
        """
        store, table = self._store, self._store.table
        # Other leaves of a row may be lost.
        rows = self.rows - store.lost.row_set if store.lost else self.rows
        if table is None:
            values = store.get_generation_values()
            show = _make_even if is_untouched else _count_up
            await call_in_turns(rows.iter_pieces(), lambda piece: show(values, piece))
            self.end()
            values[-1] = (values[-1] | 1) + 1
            values[-1] |= bool(store.lost or store.writes)
            then()
            return
        written = [number for key in self._keys or [()] for number in store.find_numbers(key)] if is_written else []
        show_rows = table.state.show_untouched if is_untouched else partial(table.state.show, keys=written)
        await call_in_turns(table.state.iter_steps(rows.iter_pieces()), show_rows)
        try:
            then()
        finally:
            await call_in_turns(table.state.iter_steps(rows.iter_pieces()), table.state.let_go)
            self.end()

    async def drop(self, then: Callable[[], None]) -> None:
        """Removes hidden rows from their table, since they will never be whole.

        Args:
            then: Called once they are removed, before another writer may have them.
        """
        table = self._store.get_table()
        await call_in_turns(
            table.state.iter_steps(self.rows.iter_pieces()),
            lambda rows: table.state.remove(rows[table.state.is_live(rows)]),
        )
        then()
        await call_in_turns(table.state.iter_steps(self.rows.iter_pieces()), table.ring.let_go)
        self.end()

    def end(self) -> None:
        """Ends the write; its rows stay unreadable."""
        self._store.writes[:] = [rows for rows in self._store.writes if rows is not self.rows]


@asynccontextmanager
async def hold_rows(
    store: OpenedStore, rows: RowSet, keys: Sequence[Path], wanted: RowDemands = NO_DEMANDS
) -> AsyncIterator[RowWriteHold]:
    """Holds rows during a block that records a write; it must not wait. The rows are hidden from its end on; if it
    raises, they stay as they were.

    Arguments and errors as for :class:`RowWriteHold` and its ``hold``.
    """
    held = RowWriteHold(store, rows, keys)
    await held.hold(wanted)
    try:
        yield held
    except BaseException:
        await held.give_back()
        raise
    await held.hide()


async def look_at_rows(table: Table, rows: RowSet, check: Check, then: Callable[[Rows], object] = do_nothing) -> None:
    """Checks rows of a table, some at a time: raises if one is not live, or what ``check`` raises.

    Args:
        then: Called with rows that may be written.
    """
    num_seen = 0

    def look(some: Rows) -> None:
        nonlocal num_seen
        table.state.check_live(some)
        check(some, slice(num_seen, num_seen + len(some)))
        num_seen += len(some)
        then(some)

    await call_in_turns(table.state.iter_steps(rows.iter_pieces()), look)


def _make_odd(values: NDArray[np.int64], piece: slice | NDArray[np.int64]) -> None:
    values[piece] |= 1


def _make_even(values: NDArray[np.int64], piece: slice | NDArray[np.int64]) -> None:
    values[piece] &= ~1


def _count_up(values: NDArray[np.int64], piece: slice | NDArray[np.int64]) -> None:
    values[piece] += 1


def is_free(store: OpenedStore, rows: RowSet) -> bool:
    """Returns whether no write has one of these rows."""
    return not any(rows.has_overlap(others) for others in store.writes)


async def wait_for_others(session: ClientSession, store: OpenedStore, rows: RowSet, deadline: Deadline) -> None:
    """Waits until no other write has one of these rows. Another caller that waited may have them by then.

    Raises:
        DeadlineExceededError: Another write still has some, for example that of a stopped local client.
    """
    if store.writes:
        await session.wait_until(
            store.waiters,
            partial(is_free, store, rows),
            deadline,
            lambda: f"the end of another write to rows of {store.name!r}",
        )
