"""Builds selectors for conditions that no sample has requested before, while others are served."""

from __future__ import annotations

import asyncio

from tdserve.base.deadline import Deadline
from tdserve.base.errors import DeadlineExceededError
from tdserve.rules.replay.selections import SampleConditions
from tdserve.server import inline_tasks
from tdserve.server.opened_store import OpenedStore
from tdserve.server.opening import LONG_ROWS
from tdserve.server.sessions.session import ClientSession
from tdserve.server.turns import in_turns
from tdserve.server.waiting import hear


class ViewBuilding:
    """Builds selectors in tasks. If a sample gives up, for example at its deadline, the next one finds the work
    continued.

    Only one is built per table at a time.
    """

    def __init__(self) -> None:
        self._under_way: dict[tuple[str, SampleConditions], asyncio.Task[None]] = {}

    async def ready(
        self, session: ClientSession, entry: OpenedStore, key: SampleConditions, deadline: Deadline
    ) -> None:
        """Waits until a table of very many rows has a selector. A smaller table builds it at once when it is requested.

        Raises:
            DeadlineExceededError: It was not built in time.
            StoreNotFoundError: The table was deleted.
            CapacityError: There are too many consumers.
        """
        table = entry.replay_table()
        if entry.record.capacity < LONG_ROWS or table.selectors.has(key):
            return
        await inline_tasks.in_task()
        name = entry.record.uid, key
        task = self._under_way.get(name)
        if task is None:
            task = self._under_way[name] = asyncio.create_task(_build(entry, key), name="tdserve-view-building")
            task.add_done_callback(lambda _: self._end(name))
        with session.waiting():
            await asyncio.wait({task}, timeout=deadline.remaining_s)
        if not task.done():
            what = f"the rows of {entry.name!r} to be looked at for the first sample of its kind"
            raise DeadlineExceededError(what=what, timeout_s=deadline.timeout_s)
        if task.exception() is not None:
            entry.check_present()  # a deleted table lacks files too
        task.result()

    def _end(self, name: tuple[str, SampleConditions]) -> None:
        hear(self._under_way.pop(name))


async def _build(entry: OpenedStore, key: SampleConditions) -> None:
    selectors = entry.replay_table().selectors
    async with entry.view_lock:
        if not selectors.has(key):
            selector = await asyncio.to_thread(selectors.make, key)
            entry.check_present()
            await in_turns(selectors.grow_in_pieces(key, selector))
