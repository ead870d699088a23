"""Brings stores to rest: from then on they are not used, until their seals end.

``server/README.md`` has reading orders of checkpoints and moves.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial

from tdserve.base.deadline import Deadline
from tdserve.base.errors import DeadlineExceededError, StoreNotFoundError, WrongStateError
from tdserve.server.catalog.seals import Seal
from tdserve.server.catalog.stores import Stores
from tdserve.server.open_store.opened_store import OpenedStore

POLL_S = 0.005
"""Pause between two looks at what a store that is being sealed still waits for."""


class Sealing:
    """Seals stores and waits until nothing is under way for them.

    Args:
        stores: All stores of the server.
    """

    def __init__(self, stores: Stores) -> None:
        self._stores = stores

    def begin(self, store: OpenedStore, seal: Seal) -> None:
        """Seals a store against all use. It serves again after ``end``, or when the session ends.

        Raises:
            StoreMovedError: Another move has sealed it.
        """
        self._stores.seals.seal(store.name, seal)
        # Claims first: what their writers have filled is acknowledged, and must be committed.
        store.is_leaving = True
        if store.table is not None:
            store.catch_up()
            store.table.state.take_back_claims()

    async def wait_at_rest(
        self,
        store: OpenedStore,
        seal: Seal,
        deadline: Deadline,
        *,
        keeps_unfinished: bool = False,
        num_own_requests: int = 0,
    ) -> OpenedStore:
        """Waits until nothing can still write into a store's files. After an error it stays sealed.

        What was decided before is carried out. So a table that gets leaves just now has them when it is at rest, and
        is another object then.

        Args:
            keeps_unfinished: Whether rows may be left that a lost or stopped writer has not finished: they are odd.
            num_own_requests: Requests for the store in which the caller itself is.

        Returns:
            The store as it is at rest.

        Raises:
            DeadlineExceededError: A client is still writing, or was stopped while it did.
            StoreNotFoundError: A request that had begun before has deleted it.
            WrongStateError: The seal is over: its session has ended.
        """
        name, table = store.name, store.table

        async def wait(is_over: Callable[[], bool], what: str) -> None:
            await _wait(is_over, deadline, what)
            if self._stores.seals.find(name) != seal:
                raise WrongStateError(state=f"the seal of {name!r} is over", event="reading it at rest")
            store.waiters.check_not_gone()

        def is_settled() -> bool:
            return not self._is_changing(store) and (keeps_unfinished or not self._has_unfinished(store))

        if table is not None:
            await wait(lambda: not table.claims, f"writers that fill rows of {name!r} by themselves")
        store.waiters.begin_seal(name)
        is_idle = partial(self._stores.seals.is_idle, name, num_own=num_own_requests)
        await wait(is_idle, f"requests under way for {name!r}")
        await wait(is_settled, f"rows of {name!r} that a client has begun to write")
        await wait(lambda: not store.is_restructuring, f"the lack of room for new leaves of {name!r}")
        resting = self._stores.opened.peek(name)
        if resting is None or resting.record.uid != store.record.uid:
            raise StoreNotFoundError(name=name)
        resting.waiters.begin_rest()
        return resting

    def _is_changing(self, store: OpenedStore) -> bool:
        return bool(store.writes) or self._stores.unfinished_writes.is_dropping(store)

    def _has_unfinished(self, store: OpenedStore) -> bool:
        if store.table is None:  # rows stay lost until they are written again, by whomever
            return self._stores.unfinished_writes.may_be_written(store, store.lost.row_set)
        ring = store.table.ring
        return bool(ring.num_reserved or ring.select_held(store.lost.row_set))  # others have left, and stay on the list

    def end(self, name: str, seal: Seal) -> None:
        """Lets a store serve again. Does nothing unless this very seal holds it."""
        if self._stores.seals.find(name) == seal:
            self._end(name)

    def end_all(self, session: int) -> None:
        """Lets the stores serve again that a session had sealed."""
        for name in self._stores.seals.list_of(session):
            self._end(name)

    def _end(self, name: str) -> None:
        self._stores.seals.unseal(name)
        store = self._stores.opened.peek(name)
        if store is not None:
            store.is_leaving = False
            store.waiters.end_seal()


async def _wait(is_over: Callable[[], bool], deadline: Deadline, what: str) -> None:
    while not is_over():
        if deadline.expired:
            raise DeadlineExceededError(what=f"the end of {what}", timeout_s=deadline.timeout_s)
        await asyncio.sleep(POLL_S)
