"""Discards rows that are too old from queues, and groups that have some from any table: very many a piece at a time,
while samples that wait stay in line."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

from tdserve.rules.replay.eligibility.conditions import OWN, SampleConditions
from tdserve.server.catalog.stores import Stores
from tdserve.server.execution import inline_tasks
from tdserve.server.execution.turns import run_in_turns
from tdserve.server.execution.waiting import retrieve_exception
from tdserve.server.kinds.policies import refresh_staleness
from tdserve.server.open_store.opened_store import OpenedStore
from tdserve.server.sessions.client_session import ClientSession


class Discarding:
    """Discards rows that are too old before a sample with a maximum lag is drawn.

    Args:
        stores: All stores of the server.
    """

    def __init__(self, stores: Stores) -> None:
        self._stores = stores
        self._under_way: dict[str, asyncio.Task[None]] = {}

    async def finish(
        self, session: ClientSession, store: OpenedStore, max_lag: int | None, conditions: SampleConditions
    ) -> None:
        """Discards all rows that are too old, however many, before a sample gets in line; arguments as in
        :meth:`refresh`.

        Raises:
            StoreNotFoundError: The table was deleted.
        """
        while not self.refresh(store, max_lag, conditions):
            await inline_tasks.ensure_task()
            task = self._under_way.get(store.record.uid)
            if task is not None:
                with session.mark_waiting():
                    await asyncio.wait({task})
            store.check_present()

    def refresh(self, store: OpenedStore, max_lag: int | None, conditions: SampleConditions) -> bool:
        """Updates the table's newest policy version, and discards: in a queue, and for a consumer without which rows do
        not leave, the rows that are too old; for a sample of groups the groups that have one.

        Args:
            max_lag: Largest lag that is not too old; None: any, and nothing is done.
            conditions: Conditions of the sample. If it has any other consumer, its table keeps all groups for the
                others.

        Returns:
            Whether that is done. For very many rows it continues for many turns, and then wakes those who wait.
        """
        if max_lag is None:
            return True
        refresh_staleness(self._stores, store)
        table, uid = store.get_table(), store.record.uid
        is_awaited = conditions.consumer in table.settings.consumers  # the others would keep them for ever
        group = conditions.group if conditions.consumer == OWN or is_awaited else ""
        if not (table.settings.is_queue or is_awaited or group):
            return True
        if uid in self._under_way:
            return False
        num_old = table.departures.count_too_old(max_lag)
        if num_old > table.state.step_rows or (group and num_old and table.ring.num_used > table.state.step_rows):
            discarding = self._discard(store, table.departures.discard_in_pieces(max_lag, group=group))
            task = asyncio.get_running_loop().create_task(discarding, name="tdserve-discarding")
            task.add_done_callback(retrieve_exception)
            self._stores.seals.count_task(store.name, task)
            self._under_way[uid] = task
            return False
        if table.departures.discard(max_lag, group=group):
            store.waiters.wake()
        return True

    async def _discard(self, store: OpenedStore, pieces: Iterator[int]) -> None:
        try:
            await run_in_turns(pieces)
        finally:
            del self._under_way[store.record.uid]
            store.waiters.wake()
