"""Reserves rows for extends: very many a part at a time, while others are served in between."""

from __future__ import annotations

import asyncio
from functools import partial

import numpy as np

from tdserve.base.deadline import Deadline
from tdserve.messages.row_numbers import Rows
from tdserve.rules.replay.reservation import Reservation
from tdserve.server import inline_tasks
from tdserve.server.opened_store import OpenedStore
from tdserve.server.sessions.client_session import ClientSession
from tdserve.server.turns import drop_references

_NUM_JOINED = 128
"""Parts that are joined at a time: thousands at once take milliseconds."""


async def reserve_rows(session: ClientSession, store: OpenedStore, num_rows: int, deadline: Deadline) -> Reservation:
    """Waits for free rows and reserves them. If it raises, none are reserved.

    Raises:
        InvalidRequestError, TooLargeError: There can never be so many.
        WrongStateError, StoreNotFoundError: The table was closed or deleted.
        DeadlineExceededError: They were not free in time.
    """
    table = store.get_table()
    line = ("extend", num_rows)

    def explain() -> str:
        return table.explain_extend(num_rows)

    if num_rows <= table.step_rows:
        return await session.wait(
            store.waiters, partial(table.reserve, num_rows), deadline, explain, line=line, give_back=table.abort
        )
    await inline_tasks.ensure_task()
    await session.wait(
        store.waiters,
        lambda: table.begin_reserving(num_rows) or None,
        deadline,
        explain,
        line=line,
        give_back=lambda _: table.end_reserving(),
    )
    parts: list[Reservation] = []
    newest: list[Reservation] = []
    missing = num_rows
    try:
        while missing:
            attempt = partial(table.reserve_part, min(missing, table.step_rows))
            newest.append(await session.wait(store.waiters, attempt, deadline, explain, give_back=table.abort))
            missing -= len(newest[-1])
            if len(newest) == _NUM_JOINED or not missing:
                parts.append(table.ring.join(newest, await asyncio.to_thread(_get_rows, newest)))
                newest = []
            await asyncio.sleep(0)
        rows = await asyncio.to_thread(_get_rows, parts, must_sort=not table.settings.remover.is_ring)
        joined, last_references = table.ring.join(parts, rows), [parts]
        parts = [joined]
        drop_references(last_references, num_rows=num_rows)
        await asyncio.to_thread(lambda: joined.encoded)
    except BaseException:
        for part in (*parts, *newest):
            table.abort(part)
        raise
    finally:
        table.end_reserving()
        store.waiters.wake()
    return parts[0]


def _get_rows(parts: list[Reservation], *, must_sort: bool = False) -> Rows:
    """Returns the rows of all parts; sorts them where they are not in the order of a ring, to encode to few bytes."""
    rows = np.concatenate([part.rows for part in parts])
    return np.sort(rows) if must_sort else rows
