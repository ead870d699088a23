"""Builds selectors for conditions that no sample has requested before, while others are served."""

from __future__ import annotations

import asyncio

from tdserve.base.deadline import Deadline
from tdserve.base.errors import DeadlineExceededError
from tdserve.rules.replay.eligibility.conditions import SampleConditions
from tdserve.server.execution import inline_tasks
from tdserve.server.execution.rule_memory import CONDITION_ROW_BYTES, check_rule_memory
from tdserve.server.execution.turns import drop_references, run_in_turns
from tdserve.server.execution.waiting import retrieve_exception
from tdserve.server.kinds.table_kind import LONG_ROWS
from tdserve.server.open_store.opened_store import OpenedStore
from tdserve.server.sessions.client_session import ClientSession


class SelectorBuilding:
    """Builds selectors in tasks. If a sample gives up, for example at its deadline, the next one finds the work
    continued.

    Only one is built per table at a time.
    """

    def __init__(self) -> None:
        self._under_way: dict[tuple[str, SampleConditions, int], asyncio.Task[None]] = {}

    def refresh(self, store: OpenedStore, conditions: SampleConditions, num_rows: int) -> bool:
        """Returns whether a table has a selector for a sample of this many rows. If not, builds it in a task, and wakes
        those who wait afterwards. A table of few rows builds it at once when it is requested."""
        if store.record.capacity < LONG_ROWS or store.get_table().selectors.has(conditions, num_rows):
            return True
        name = store.record.uid, conditions, num_rows
        if name not in self._under_way:
            building = _build(store, conditions, num_rows)
            task = asyncio.get_running_loop().create_task(building, name="tdserve-selector-building")
            self._under_way[name] = task
            task.add_done_callback(lambda _: self._end(name))
            task.add_done_callback(lambda _: store.waiters.wake())
        return False

    async def wait_ready(
        self,
        session: ClientSession,
        store: OpenedStore,
        conditions: SampleConditions,
        num_rows: int,
        deadline: Deadline,
    ) -> None:
        """Waits until a table of very many rows has a selector for a sample of this many rows.

        Raises:
            DeadlineExceededError: It was not built in time.
            StoreNotFoundError: The table was deleted.
            CapacityError: There are too many consumers.
        """
        while not self.refresh(store, conditions, num_rows):
            task = self._under_way[store.record.uid, conditions, num_rows]
            await inline_tasks.ensure_task()
            with session.mark_waiting():
                await asyncio.wait({task}, timeout=deadline.remaining_s)
            if not task.done():
                what = f"the rows of {store.name!r} to be looked at for the first sample of its kind"
                raise DeadlineExceededError(what=what, timeout_s=deadline.timeout_s)
            if task.exception() is not None:
                store.check_present()  # a deleted table lacks files too
            task.result()

    def _end(self, name: tuple[str, SampleConditions, int]) -> None:
        retrieve_exception(self._under_way.pop(name))


async def _build(store: OpenedStore, conditions: SampleConditions, num_rows: int) -> None:
    selectors = store.get_table().selectors
    async with store.view_lock:
        await run_in_turns(selectors.shed_in_pieces(conditions))
        if not selectors.has(conditions):
            check_rule_memory(store.record.capacity, CONDITION_ROW_BYTES)
            grown = await asyncio.to_thread(selectors.make, conditions)
            store.check_present()
            await run_in_turns(selectors.grow_in_pieces(conditions, grown))
            store.check_present()
            drop_references(selectors.dropped, num_rows=store.record.capacity)
            await run_in_turns(selectors.shed_in_pieces(conditions))
        selector = selectors.get(conditions) if selectors.has(conditions) else None
        preparation = None if selector is None else selector.prepare(num_rows)
        if preparation is not None:
            await asyncio.to_thread(preparation.search)
            await run_in_turns(preparation.finish_in_pieces())
            drop_references(preparation.dropped, num_rows=store.record.capacity)
