"""Stores that are on record as deleted: their files are moved away, and their names are free."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace

from tdserve.base.errors import TDServeError
from tdserve.rules.catalog import Catalog, StoreRecord
from tdserve.store.database.catalog_db import CatalogDB
from tdserve.store.roots.root import Root

_log = logging.getLogger("tdserve.server")


class RemovedStores:
    """Takes deleted stores away.

    If the folder of one cannot be moved, for example since there is no room for another name, no client sees the store,
    and its name stays taken until its files are removed, at the latest at a later start.

    Args:
        root: The root.
        db: Its catalog.
        catalog: The stores' records.
    """

    def __init__(self, root: Root, db: CatalogDB, catalog: Catalog) -> None:
        self._root = root
        self._db = db
        self._catalog = catalog

    def restore(self, record: StoreRecord) -> None:
        """Takes a store away that was invisible, or was being deleted, before a restart."""
        if self.move_away(record) or self._root.remove_in_place(record.name):
            self._db.delete("stores", record.name.encode())
        else:
            self._catalog.add(record)

    def remove(self, record: StoreRecord) -> None:
        """Takes a store away; ``finish`` does the rest."""
        if self.move_away(record):
            self._free_name(record)
        else:
            self._catalog.replace(replace(record, loading=True))

    async def finish(self, record: StoreRecord) -> None:
        """Removes the files of a store that could not be moved, and frees its name."""
        if self._is_here(record) and await asyncio.to_thread(self._root.remove_in_place, record.name):
            self._free_name(record)

    def finish_now(self, record: StoreRecord) -> None:
        """Like ``finish``, for a store of few files."""
        if self._is_here(record) and self._root.remove_in_place(record.name):
            self._free_name(record)

    def move_away(self, record: StoreRecord) -> bool:
        """Moves the folder of a store that is no more away from its name; returns whether that was possible."""
        try:
            self._root.move_to_trash(record.name, record.uid)
        except TDServeError as error:
            _log.error("the files of the deleted store %r cannot be moved away: %s", record.name, error)
            return False
        return True

    def _is_here(self, record: StoreRecord) -> bool:
        return self._catalog.find_name(record.uid) is not None

    def _free_name(self, record: StoreRecord) -> None:
        self._db.delete("stores", record.name.encode())
        self._catalog.remove(record.name)
