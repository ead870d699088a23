"""Weights stores without a version yet: invisible, and removed when nobody publishes to them any more.

Concurrent publishers share such a store; the first complete version makes it visible. It stays, invisible, for as long
as an interrupted local client may still write into its folder. A publisher that comes in that time gets another version
number.
"""

from __future__ import annotations

from functools import partial

from tdserve.base.deadline import Deadline
from tdserve.base.errors import StoreExistsError
from tdserve.rules.catalog import StoreRecord
from tdserve.server.opened_store import OpenedStore
from tdserve.server.stores import Stores
from tdserve.store.catalog_db import Transaction
from tdserve.structure.tree import Spec

_NO_SESSION = -1
"""Owner of these stores: they end with their last publisher, not with a session."""


class Unpublished:
    """Creates such stores, makes them visible, and removes them.

    Args:
        stores: All stores of the server.
    """

    def __init__(self, stores: Stores) -> None:
        self._stores = stores
        self._writers: dict[str, set[str]] = {}  # by uid of the store: locks of clients that may still write

    def restore(self) -> None:
        """Removes such stores after a restart, each once no earlier client can write into it. Call it on the event
        loop, before clients are served."""
        for record in self._stores.catalog:
            if record.loading:
                for lock_name in self._stores.process_watch.list_held():
                    self._wait_for(record, lock_name)
                self._remove_unused(record)

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
            txn.show(lambda: self._forget_writers(store))

    def give_up(self, store: OpenedStore, writer: str) -> None:
        """Handles a publish that was aborted: removes its store if nobody else uses it.

        Args:
            store: Its store. A store that has a version, or may still get one, stays.
            writer: Lock of the local client that may still write; "" for none.
        """
        if not store.record.loading or store.waiters.is_deleted:
            return
        if writer:
            self._wait_for(store.record, writer)
        self._remove_unused(store.record)

    def _forget_writers(self, store: OpenedStore) -> None:
        self._writers.pop(store.record.uid, None)

    def _wait_for(self, record: StoreRecord, writer: str) -> None:
        self._writers.setdefault(record.uid, set()).add(writer)
        self._stores.process_watch.watch(writer, partial(self._on_gone, record, writer))

    def _on_gone(self, record: StoreRecord, writer: str) -> None:
        if record.uid in self._writers:
            self._writers[record.uid].discard(writer)
            self._remove_unused(record)

    def _remove_unused(self, record: StoreRecord) -> None:
        if self._writers.get(record.uid):
            return
        self._writers.pop(record.uid, None)
        store = self._stores.find_opened(record)
        if store is None or (store.record.loading and store.get_versions().is_unused):
            self._stores.discard(record)
