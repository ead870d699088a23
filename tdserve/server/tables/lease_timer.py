"""Gives rows back whose lease is over: one timer for the leases of all tables.

``server/README.md`` has a reading order of leases.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Iterator
from heapq import heappop, heappush

from tdserve.base.errors import InvalidRequestError
from tdserve.server.catalog.stores import Stores
from tdserve.server.execution.turns import run_in_turns
from tdserve.server.execution.waiting import retrieve_exception
from tdserve.server.open_store.opened_store import OpenedStore


def check_lease_s(lease_s: float) -> None:
    """Raises InvalidRequestError unless this is a time that a lease may last."""
    if not 0.0 < lease_s < math.inf:  # not a number is neither
        raise InvalidRequestError(argument="lease_s", reason=f"{lease_s} is not a number of seconds above 0")


class LeaseTimer:
    """Ends leases that last for a limited time. A lease without a limit costs nothing here.

    Nothing of it is on record: all leases end with the process.

    Args:
        stores: All stores of the server.
    """

    def __init__(self, stores: Stores) -> None:
        self._stores = stores
        self._next_s: dict[str, float] = {}  # by incarnation of the table: when it is looked at
        self._due: list[tuple[float, str]] = []  # with stale entries of tables that are to be looked at sooner
        self._timer: asyncio.TimerHandle | None = None
        self._under_way: dict[str, asyncio.Task[None]] = {}

    def limit(self, store: OpenedStore, session: int, request: int, lease_s: float) -> None:
        """Has the lease that a session was granted for a request end after a time, which begins now."""
        store.get_table().selectors.leases.set_end(session, request, time.monotonic() + lease_s)
        self.watch(store)

    def watch(self, store: OpenedStore) -> None:
        """Looks at a table when its next lease ends; call it after an end was set."""
        next_s, uid = store.get_table().selectors.leases.next_end_s, store.record.uid
        if next_s < self._next_s.get(uid, math.inf) and uid not in self._under_way:
            self._next_s[uid] = next_s
            heappush(self._due, (next_s, uid))
            self._set_timer()

    def close(self) -> None:
        """Ends the timer, and what it has begun."""
        if self._timer is not None:
            self._timer.cancel()
        for task in self._under_way.values():
            task.cancel()

    def _set_timer(self) -> None:
        loop = asyncio.get_running_loop()
        if not self._due or (self._timer is not None and self._timer.when() <= self._due[0][0]):
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer = loop.call_at(self._due[0][0], self._look)

    def _look(self) -> None:
        self._timer, now_s = None, time.monotonic()
        while self._due and self._due[0][0] <= now_s:
            next_s, uid = heappop(self._due)
            if self._next_s.get(uid) != next_s:
                continue
            del self._next_s[uid]
            name = self._stores.catalog.find_name(uid)
            store = None if name is None else self._stores.opened.peek(name)
            if store is not None and store.table is not None:
                self._look_at(store, now_s)
        self._set_timer()

    def _look_at(self, store: OpenedStore, now_s: float) -> None:
        if store.get_table().selectors.leases.next_end_s > now_s:  # what would have ended was acknowledged or renewed
            self.watch(store)
            return
        uid = store.record.uid
        task = asyncio.get_running_loop().create_task(self._end_leases(store), name="tdserve-ending-leases")
        self._under_way[uid] = task
        task.add_done_callback(retrieve_exception)

    async def _end_leases(self, store: OpenedStore) -> None:
        try:
            # No acknowledgement is half carried out meanwhile: one that has begun counts.
            async with store.write_lock:
                if store.waiters.is_gone:
                    return
                await run_in_turns(_give_back_in_pieces(store))
        finally:
            del self._under_way[store.record.uid]
        self.watch(store)


def _give_back_in_pieces(store: OpenedStore) -> Iterator[None]:
    for _ in store.get_table().selectors.release_over_in_pieces(time.monotonic()):
        store.waiters.wake()
        yield
