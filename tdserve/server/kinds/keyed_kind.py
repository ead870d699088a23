"""Keyed stores."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path as FilePath
from typing import Any

import numpy as np

from tdserve.base.errors import InvalidSpecError, TDServeError
from tdserve.rules.catalog import StoreRecord
from tdserve.rules.kv.keyed_settings import KeyedSettings
from tdserve.rules.kv.keyed_state import KeyedState
from tdserve.server.kinds.store_kind import KindStores, StoreKind
from tdserve.server.open_store.opened_store import OpenedStore
from tdserve.server.open_store.specs import Specs
from tdserve.store.database.catalog_db import CatalogDB
from tdserve.store.durability.watermark import SyncedStore, Watermark
from tdserve.store.rows.generations import FILE_NAME as GENERATION_FILE, Generations
from tdserve.store.values import object_folders
from tdserve.store.values.entry_tables import EntryTables, skip_versions
from tdserve.store.values.objects import Objects
from tdserve.store.values.use_marks import UseMarks
from tdserve.store.values.value_copy import ValueCopy
from tdserve.structure.trees.tree import Spec
from tdserve.v1 import control_pb2

_MIN_MAP_BYTES, _MAX_MAP_BYTES = 1 << 30, 1 << 40
"""Limits for the map of a store without ``max_bytes``. It is address space only; a process has room for 128 of the
largest at a time, and for thousands on a usual disk."""

_MAP_STEP_BYTES = 1 << 20

_MAP_FACTOR = 3
"""Room of the map for each byte that a store may have: overwriting needs new pages before the old ones are free."""

_MAP_MARGIN_BYTES = 1 << 26

_MAX_EXPIRED = 1000
"""Most expired entries that a description looks at: control's event loop makes it."""


class KeyedKind(StoreKind):
    """Keyed stores; see :class:`StoreKind`."""

    name = "keyed"

    def make_record(self, asked: control_pb2.CreateStoreRequest, spec: Spec, stores: KindStores) -> StoreRecord:
        settings = KeyedSettings.from_json(asked.settings)
        if settings.like == "any" and spec.root.entries:
            raise InvalidSpecError(store=asked.name, reason="it has entries of any structure, and cannot have one")
        num_bytes = _compute_map_bytes(settings.max_bytes, stores.root.path)
        return StoreRecord(
            name=asked.name,
            kind=self.name,
            uid="",
            fingerprint=spec.fingerprint,
            num_rows=1,
            settings=settings.to_json(),
            max_object_bytes=num_bytes,
        )

    def make_stored_spec(self, record: StoreRecord, spec: Spec) -> Spec:
        return KeyedSettings.from_json(record.settings).make_stored_spec(spec.fingerprint)

    def may_be_packed(self, record: StoreRecord, spec: Spec) -> bool:
        """Returns True: it has no entries yet."""
        return True

    def describe_packed(self, record: StoreRecord, description: control_pb2.StoreDescription) -> None:
        """Adds nothing: it has no entries."""

    def open(self, record: StoreRecord, stores: KindStores, *, checks: bool = False) -> OpenedStore:
        """Opens a store. Raises CapacityError if there is no room for the marks of use, and CorruptDataError."""
        folder, spec = stores.root.store_folder(record.name), stores.specs.get(record.fingerprint, record.order)
        generations = Generations.open(folder / GENERATION_FILE, uid=record.uid, writable=True)
        settings = KeyedSettings.from_json(record.settings)
        if settings.eviction == "lru":
            UseMarks(folder, creates=True)
        keyed, stored = KeyedState(settings), settings.make_stored_spec(spec.fingerprint)
        return OpenedStore(record, stored, folder, row_spec=spec, generations=generations, keyed=keyed)

    def read_last_version(self, store: OpenedStore, db: CatalogDB) -> int:
        """Returns 0 for a part of a shared store, whose versions begin at a number of its incarnation."""
        if KeyedSettings.from_json(store.record.settings).num_shards:
            return 0
        with read_tables(store) as tables:
            last = 0 if tables is None else tables.find_last_version()
        return max(last, store.record.former_version)

    def begin_copy(self, folder: FilePath, record: StoreRecord, state: dict[str, Any], db: CatalogDB) -> dict[str, Any]:
        """Skips the numbers of versions that were put since."""
        if not record.packed:
            generations = Generations.open(folder / GENERATION_FILE, uid=record.uid)
            values = object_folders.get_folder(folder, generations.objects_epoch)
            skip_versions(values, max_bytes=record.max_object_bytes)
            generations.close()
        return state

    def describe(self, store: OpenedStore, stores: KindStores, description: control_pb2.StoreDescription) -> None:
        super().describe(store, stores, description)
        description.num_rows = _count_entries(store, time.time())

    def may_have_values(self, record: StoreRecord, specs: Specs) -> bool:
        """Returns True: its entries are values."""
        return True

    def has_synced_changes(self, store: SyncedStore, *, first: int) -> bool:
        """Returns whether a pass has copied entries: they change no generation."""
        Watermark.open(store, makes=False)
        return ValueCopy(store.folder).exists

    def repair(self, folder: FilePath, record: StoreRecord, db: CatalogDB, specs: Specs) -> str:
        """Makes the entries those of the last pass. Versions of later ones are not used again."""
        ValueCopy(folder).restore()
        skip_versions(object_folders.get_folder(folder, 0), max_bytes=record.max_object_bytes)
        generations = np.zeros(record.num_rows + 1, np.int64)
        Generations.replace(
            folder / GENERATION_FILE,
            uid=record.uid,
            values=generations,
            structure=record.structure,
            former_version=record.former_version,
        )
        return ""


def _compute_map_bytes(max_bytes: int, root: FilePath) -> int:
    if max_bytes:
        wanted = min(_MAP_FACTOR * max_bytes + _MAP_MARGIN_BYTES, _MAX_MAP_BYTES)
    else:
        found = os.statvfs(root)
        wanted = min(max(found.f_blocks * found.f_frsize, _MIN_MAP_BYTES), _MAX_MAP_BYTES)
    return -(-wanted // _MAP_STEP_BYTES) * _MAP_STEP_BYTES


@contextmanager
def read_tables(store: OpenedStore) -> Iterator[EntryTables | None]:
    """A block that may read the tables of a store; None if nothing was ever put. Raises CorruptDataError."""
    generations = store.generations
    values = None if generations is None else object_folders.get_folder(store.folder, generations.objects_epoch)
    if values is None or not Objects.exists(values):
        yield None
        return
    with Objects(values) as objects:
        yield EntryTables.open(objects, store.folder)


def _count_entries(store: OpenedStore, now_s: float) -> int:
    """Returns the number of entries of a store; 0 if they cannot be read."""
    with suppress(TDServeError), read_tables(store) as tables:
        return 0 if tables is None else tables.count(b"", int(now_s * 1000), max_expired=_MAX_EXPIRED)
    return 0
