"""Weights."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path as FilePath
from typing import Any

from tdserve.rules.catalog import StoreRecord
from tdserve.rules.weights import STEP_AFTER_LOSS, Versions
from tdserve.server.kinds.store_kind import KindStores, StoreKind, load_state
from tdserve.server.open_store.opened_store import OpenedStore
from tdserve.server.open_store.specs import Specs
from tdserve.store.database.catalog_db import CatalogDB
from tdserve.store.disk.faults import convert_os_errors
from tdserve.store.rows.adopted import Adopted
from tdserve.store.weights.version_marks import begin_marks, find_marks, find_whole_versions, is_of_another
from tdserve.store.weights.version_names import remove_leftovers
from tdserve.structure.trees.tree import Spec
from tdserve.v1 import control_pb2


class WeightsKind(StoreKind):
    """Weights; see :class:`StoreKind`."""

    name = "weights"
    has_versions = True

    async def make_files(
        self, folder: FilePath, stored: Spec, record: StoreRecord, adopted: Adopted | None
    ) -> list[str]:
        """Creates the folder of versions at once, so that concurrent publishers find one store."""
        versions = folder / "versions"
        with convert_os_errors(versions):
            versions.mkdir(parents=True)
        begin_marks(versions, uid=record.uid)
        return []

    def open(self, record: StoreRecord, stores: KindStores, *, checks: bool = False) -> OpenedStore:
        folder, versions = stores.root.store_folder(record.name), load_versions(stores.db, record)
        named = versions.newest or record
        store = OpenedStore(record, stores.specs.get(named.fingerprint, named.order), folder, versions=versions)
        store.hold_synced(map(int, find_marks(folder / "versions", record.uid)))
        kept = {store.synced_version, *(version.version for version in versions.kept)}
        remove_leftovers(folder / "versions", kept=kept, free=set(versions.files) - kept)
        return store

    def begin_copy(self, folder: FilePath, record: StoreRecord, state: dict[str, Any], db: CatalogDB) -> dict[str, Any]:
        """Skips the numbers of versions that were published since."""
        return {**state, "last_begun": state["last_begun"] + STEP_AFTER_LOSS} if state else state

    def get_state(self, store: OpenedStore) -> dict[str, Any]:
        return store.get_versions().get_state()

    def read_last_version(self, store: OpenedStore, db: CatalogDB) -> int:
        return (store.versions or load_versions(db, store.record)).last_number

    def rename_orders(self, state: dict[str, Any], names: Mapping[tuple[bytes, str], str]) -> dict[str, Any]:
        versions = Versions.restore(state)
        versions.rename_orders(names)
        return versions.get_state()

    def describe(self, store: OpenedStore, stores: KindStores, description: control_pb2.StoreDescription) -> None:
        super().describe(store, stores, description)
        versions = store.get_versions()
        for version in versions.kept:
            description.versions.add(
                version=version.version,
                nbytes=version.nbytes,
                created_s=version.created_s,
                metadata=version.metadata,
            )
        description.version = versions.newest.version if versions.newest else 0
        description.fanout = versions.fanout

    def observe(self, store: OpenedStore, figures: control_pb2.StoreFigures) -> None:
        newest, kept = store.get_versions().newest, store.get_versions().kept
        figures.num_versions = len(kept)
        if newest is not None:
            figures.newest_age_s = max(time.time() - newest.created_s, 0.0)
            store.readers.add_figures(newest.version, figures)

    def may_have_values(self, record: StoreRecord, specs: Specs) -> bool:
        """Returns False: each version has its values in its own file."""
        return False

    def is_folder_of(self, folder: FilePath, record: StoreRecord) -> bool:
        return folder.exists() and not is_of_another(folder / "versions", uid=record.uid)

    def repair(self, folder: FilePath, record: StoreRecord, db: CatalogDB, specs: Specs) -> str:
        state = load_state(db, record.uid)
        if not state:
            return ""
        found = find_whole_versions(folder / "versions", uid=record.uid)
        whole = {number: json.loads(version) for number, version in sorted(found.items())}
        num_lost = len({kept[0] for kept in state["kept"]} - set(whole))
        state["kept"] = [version for version, _ in whole.values()]
        state["orders"] = [[number, order] for number, (_, order) in whole.items() if order]
        state["free"], state["checksums"] = [], []
        # Remote readers may know later versions: a number that a client has seen is never given again.
        state["last_begun"] = max(state["last_begun"], *whole, 0) + STEP_AFTER_LOSS
        with db.begin_transaction() as txn:
            txn.put("states", record.uid.encode(), json.dumps(state).encode())
        return f"{num_lost} versions" if num_lost else ""


def load_versions(db: CatalogDB, record: StoreRecord) -> Versions:
    """Returns the versions of a weights store as they were saved; none if it has none yet. Raises CorruptDataError."""
    state = load_state(db, record.uid)
    versions = Versions.restore(state) if state else Versions()
    versions.skip(record.former_version)
    return versions
