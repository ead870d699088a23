"""Weights stores without a version yet: invisible, and removed when no client publishes to them any more.

Concurrent publishers share such a store; the first complete version makes it visible.
"""

from __future__ import annotations

from tdserve.base.deadline import Deadline
from tdserve.base.errors import StoreExistsError
from tdserve.rules.catalog import StoreRecord
from tdserve.server.catalog.stores import Stores
from tdserve.server.open_store.opened_store import OpenedStore
from tdserve.store.database.catalog_db import Transaction
from tdserve.structure.trees.tree import Spec

_NO_SESSION = -1
"""Owner of these stores: they end with their last publisher, not with a session."""


class Unpublished:
    """Creates such stores, makes them visible, and removes them.

    Args:
        stores: All stores of the server.
    """

    def __init__(self, stores: Stores) -> None:
        self._stores = stores

    async def store(self, name: str, spec: Spec, deadline: Deadline) -> OpenedStore:
        """Returns the weights store of this name, and creates it if there is none. The caller publishes to it at once,
        or gives it up.

        Raises:
            DeadlineExceededError: Another store of this name was neither created nor given up in time.
            CapacityError, InvalidRequestError: The store cannot be created; nothing is left behind.
        """
        while True:
            store = self._stores.find(name) or self._stores.find_unpublished(name)
            if store is not None:
                return store
            record = StoreRecord(name=name, kind="weights", uid="", fingerprint=spec.fingerprint, loading=True)
            try:
                return await self._stores.create(record, spec, owner_session=_NO_SESSION)
            except StoreExistsError:  # a store of another kind is being made, and may be given up
                await self._stores.wait_settled(name, deadline)

    def show(self, store: OpenedStore, txn: Transaction) -> None:
        """Makes a store visible, as part of the transaction that commits its first version. Does nothing for later
        versions."""
        if store.record.loading:
            self._stores.publish_loaded(store, txn)

    def give_up(self, store: OpenedStore) -> None:
        """Handles a publish that was aborted: removes its store unless it has a version, or may still get one."""
        if store.record.loading and not store.waiters.is_gone and store.get_versions().is_unused:
            self._stores.discard(store.record)
