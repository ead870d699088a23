"""Rows that are too old leave queues: of very many some at a time, while those who wait for rows stay in line."""

from __future__ import annotations

import asyncio

from tdserve.rules.replay.table import Table
from tdserve.server import inline_tasks
from tdserve.server.opened_store import OpenedStore
from tdserve.server.sessions.session import ClientSession
from tdserve.server.stores import Stores
from tdserve.server.tables.policies import follow
from tdserve.server.turns import in_turns
from tdserve.server.waiting import hear


class Discarding:
    """Discards before rows of at most some lag are drawn.

    Args:
        stores: The book.
    """

    def __init__(self, stores: Stores) -> None:
        self._stores = stores
        self._under_way: dict[str, asyncio.Task[None]] = {}

    async def finish(self, session: ClientSession, entry: OpenedStore, max_lag: int | None) -> None:
        """Does it, however many rows that are, before a sample gets in line.

        Raises:
            StoreNotFoundError: The table was deleted.
        """
        while not self.refresh(entry, max_lag):
            await inline_tasks.in_task()
            task = self._under_way.get(entry.record.uid)
            if task is not None:
                with session.waiting():
                    await asyncio.wait({task})
            entry.check_present()

    def refresh(self, entry: OpenedStore, max_lag: int | None) -> bool:
        """What is too old leaves a queue, and is drawn of no other table; None is drawn in any case.

        Returns:
            Whether it has left. Where it is very much, that takes many turns, after which those who wait are woken.
        """
        if max_lag is None:
            return True
        follow(self._stores, entry)
        table, uid = entry.replay_table(), entry.record.uid
        if not table.settings.is_queue:
            return True
        if uid in self._under_way:
            return False
        if table.num_too_old(max_lag) > table.step_rows:
            task = asyncio.get_running_loop().create_task(
                self._discard(entry, table, max_lag), name="tdserve-discarding"
            )
            task.add_done_callback(hear)
            self._under_way[uid] = task
            return False
        if table.discard(max_lag):
            entry.changed.wake()
        return True

    async def _discard(self, entry: OpenedStore, table: Table, max_lag: int) -> None:
        try:
            await in_turns(table.discarding(max_lag))
        finally:
            del self._under_way[entry.record.uid]
            entry.changed.wake()
