"""Discards rows that are too old from queues: very many a piece at a time, while samples that wait stay in line."""

from __future__ import annotations

import asyncio

from tdserve.rules.replay.table import Table
from tdserve.server import inline_tasks
from tdserve.server.opened_store import OpenedStore
from tdserve.server.policies import follow
from tdserve.server.sessions.client_session import ClientSession
from tdserve.server.stores import Stores
from tdserve.server.turns import run_in_turns
from tdserve.server.waiting import retrieve_exception


class Discarding:
    """Discards rows that are too old before a sample with a maximum lag is drawn.

    Args:
        stores: All stores of the server.
    """

    def __init__(self, stores: Stores) -> None:
        self._stores = stores
        self._under_way: dict[str, asyncio.Task[None]] = {}

    async def finish(self, session: ClientSession, store: OpenedStore, max_lag: int | None) -> None:
        """Discards all rows that are too old, however many, before a sample gets in line.

        Raises:
            StoreNotFoundError: The table was deleted.
        """
        while not self.refresh(store, max_lag):
            await inline_tasks.ensure_task()
            task = self._under_way.get(store.record.uid)
            if task is not None:
                with session.mark_waiting():
                    await asyncio.wait({task})
            store.check_present()

    def refresh(self, store: OpenedStore, max_lag: int | None) -> bool:
        """Updates the table's newest policy version and, in a queue, discards the rows that are too old.

        Args:
            max_lag: Largest lag that is not too old; None: any, and nothing is done.

        Returns:
            Whether that is done. For very many rows it goes on for many turns, and then wakes those who wait.
        """
        if max_lag is None:
            return True
        follow(self._stores, store)
        table, uid = store.get_table(), store.record.uid
        if not table.settings.is_queue:
            return True
        if uid in self._under_way:
            return False
        if table.num_too_old(max_lag) > table.step_rows:
            task = asyncio.get_running_loop().create_task(
                self._discard(store, table, max_lag), name="tdserve-discarding"
            )
            task.add_done_callback(retrieve_exception)
            self._under_way[uid] = task
            return False
        if table.discard(max_lag):
            store.waiters.wake()
        return True

    async def _discard(self, store: OpenedStore, table: Table, max_lag: int) -> None:
        try:
            await run_in_turns(table.discard_in_pieces(max_lag))
        finally:
            del self._under_way[store.record.uid]
            store.waiters.wake()
