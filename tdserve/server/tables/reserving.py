"""Reserves rows for extends: very many a part at a time, while others are served in between."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from tdserve.base.deadline import Deadline
from tdserve.messages.row_numbers import Rows
from tdserve.rules.replay.allocation.reservation import Reservation
from tdserve.rules.replay.table import Table
from tdserve.server.execution import inline_tasks
from tdserve.server.execution.turns import drop_references
from tdserve.server.open_store.opened_store import OpenedStore
from tdserve.server.sessions.client_session import ClientSession

if TYPE_CHECKING:
    from typing_extensions import Self

_NUM_JOINED = 128
"""Parts that are joined at a time: thousands at once take milliseconds."""


class RowsInParts:
    """Reserves the rows of a long extend in parts. Between ``begin`` and ``end`` no other writer gets rows.

    Args:
        table: Their table.
        num_rows: Their number.

    Attributes:
        num_missing: Rows that are not reserved yet.
    """

    def __init__(self, table: Table, num_rows: int) -> None:
        self._table = table
        self.num_missing = num_rows
        self._joined: list[Reservation] = []
        self._newest: list[Reservation] = []  # parts that follow them

    def begin(self) -> Self | None:
        """Begins, if the writer may have all rows now; returns None if it must wait. Errors as in
        ``TableArrivals.reserve``."""
        return self if self._table.arrivals.begin_reserving(self.num_missing) else None

    def reserve_next(self) -> Reservation | None:
        """Reserves the next part; returns None while others hold or fill too many rows."""
        part = self._table.arrivals.reserve_part(min(self.num_missing, self._table.state.step_rows))
        if part is not None:
            self._newest.append(part)
            self.num_missing -= len(part)
        return part

    async def join_newest(self) -> None:
        """Joins the newest parts, if there are many or no others follow."""
        if len(self._newest) == _NUM_JOINED or not self.num_missing:
            rows = await asyncio.to_thread(_get_rows, self._newest)
            self._joined.append(self._table.ring.join(self._newest, rows))
            self._newest = []

    async def join(self) -> Reservation:
        """Returns all rows as one reservation, encoded."""
        must_sort = not self._table.settings.remover.is_ring
        rows = await asyncio.to_thread(_get_rows, self._joined, must_sort=must_sort)
        last_references = [self._joined]
        joined = self._table.ring.join(self._joined, rows)
        self._joined = [joined]
        drop_references(last_references, num_rows=len(joined))
        await asyncio.to_thread(lambda: joined.encoded)
        return joined

    def abort(self) -> None:
        """Frees what was reserved; ``end`` must follow."""
        for part in (*self._joined, *self._newest):
            self._table.ring.abort(part)

    def end(self) -> None:
        """Lets other writers have rows again."""
        self._table.arrivals.end_reserving()


async def reserve_rows(session: ClientSession, store: OpenedStore, num_rows: int, deadline: Deadline) -> Reservation:
    """Waits for free rows and reserves them. If it raises, none are reserved.

    Raises:
        InvalidRequestError, TooLargeError: There can never be that many.
        WrongStateError, StoreNotFoundError: The table was closed or deleted.
        DeadlineExceededError: They were not free in time.
    """
    table = store.get_table()
    line, explain = ("extend", num_rows), partial(table.arrivals.explain_extend, num_rows)
    if num_rows <= table.state.step_rows:
        return await session.wait(
            store.waiters,
            partial(table.arrivals.reserve, num_rows),
            deadline,
            explain,
            line=line,
            give_back=table.ring.abort,
        )
    await inline_tasks.ensure_task()
    rows = RowsInParts(table, num_rows)
    await session.wait(store.waiters, rows.begin, deadline, explain, line=line, give_back=RowsInParts.end)
    try:
        while rows.num_missing:
            await session.wait(store.waiters, rows.reserve_next, deadline, explain)
            await rows.join_newest()
            await asyncio.sleep(0)
        return await rows.join()
    except BaseException:
        rows.abort()
        raise
    finally:
        rows.end()
        store.waiters.wake()


def _get_rows(parts: list[Reservation], *, must_sort: bool = False) -> Rows:
    """Returns the rows of all parts; sorts them where they are not in the order of a ring, to encode to few bytes."""
    rows = np.concatenate([part.rows for part in parts])
    return np.sort(rows) if must_sort else rows
