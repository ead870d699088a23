"""Weights before their first version: nobody sees their store, and it goes again when nobody publishes it any more.

Publishers that come meanwhile share it: whichever is whole first shows it. It stays, unseen, for as long as a local
client that was cut short may still write into its folder: the next publisher then gets another number.
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
"""Such a store goes with its last publisher, not with a session."""


class Unpublished:
    """Makes such stores, shows them, and removes them.

    Args:
        stores: The book.
    """

    def __init__(self, stores: Stores) -> None:
        self._stores = stores
        self._writers: dict[str, set[str]] = {}  # by uid of the store: locks of clients that may still write

    def restore(self) -> None:
        """After a restart, before anybody may ask: removes what no client of before can write any more. To be called on
        the event loop."""
        for record in self._stores.catalog:
            if record.kind == "weights" and record.loading:
                for lock_name in self._stores.departures.left():
                    self._wait_for(record, lock_name)
                self._remove_unused(record)

    async def store(self, name: str, spec: Spec, deadline: Deadline) -> OpenedStore:
        """The weights store of this name, made if there is none. The caller publishes to it at once, or gives it up.

        Raises:
            DeadlineExceededError: The store that is being made under this name was neither done nor given up in time.
            CapacityError, InvalidRequestError: It cannot be made; nothing stays behind.
        """
        while True:
            entry = self._stores.find(name) or self._stores.find_unpublished(name)
            if entry is not None:
                return entry
            record = StoreRecord(name=name, kind="weights", uid="", fingerprint=spec.fingerprint, loading=True)
            try:
                return await self._stores.create(record, spec, owner_session=_NO_SESSION)
            except StoreExistsError:  # a store of another kind is being made, and may be given up
                await self._stores.wait_settled(name, deadline)

    def show(self, entry: OpenedStore, txn: Transaction) -> None:
        """Makes a store visible, as part of the transaction that commits its first version; later ones change
        nothing."""
        if entry.record.loading:
            self._stores.publish_loaded(entry, txn)
            txn.show(lambda: self._forget_writers(entry))

    def give_up(self, entry: OpenedStore, writer: str) -> None:
        """A publish has failed, and was aborted.

        Args:
            entry: Its store; one that has, or will have, a version stays.
            writer: Lock of the local client that may still be writing; "" for none.
        """
        if not entry.record.loading or entry.changed.is_deleted:
            return
        if writer:
            self._wait_for(entry.record, writer)
        self._remove_unused(entry.record)

    def _forget_writers(self, entry: OpenedStore) -> None:
        self._writers.pop(entry.record.uid, None)

    def _wait_for(self, record: StoreRecord, writer: str) -> None:
        self._writers.setdefault(record.uid, set()).add(writer)
        self._stores.departures.watch(writer, partial(self._on_gone, record, writer))

    def _on_gone(self, record: StoreRecord, writer: str) -> None:
        if record.uid in self._writers:
            self._writers[record.uid].discard(writer)
            self._remove_unused(record)

    def _remove_unused(self, record: StoreRecord) -> None:
        if self._writers.get(record.uid):
            return
        self._writers.pop(record.uid, None)
        entry = self._stores.opened_as(record)
        if entry is None or (entry.record.loading and entry.weight_versions().is_unused):
            self._stores.discard(record)
