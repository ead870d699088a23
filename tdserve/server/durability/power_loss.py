"""Recovery from a loss of power: only what is known to have reached the disk counts.

After a loss of power, any subset of the pages that were written since the last sync may be on the disk. Neither the
catalog nor a generation can be trusted then, since their pages may be of different moments. So the catalog
is replaced by its copy of the last sync, and rows and versions count only if they prove to be unchanged. All of this
can be repeated after a crash in the middle.

``server/README.md`` has reading orders of recovery and syncs.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

from tdserve.base.errors import TDServeError
from tdserve.rules.catalog import StoreRecord
from tdserve.server.catalog.packed_stores import has_content
from tdserve.server.kinds.all_kinds import KINDS
from tdserve.server.kinds.row_files import FILLED
from tdserve.server.open_store.specs import Specs
from tdserve.server.recovery.departure_records import DEPARTURE
from tdserve.server.recovery.restructured import Restructured
from tdserve.store.database.catalog_db import CatalogDB
from tdserve.store.database.environments import DATA_FILE, hold_page_checks
from tdserve.store.durability.sync_pass import Pass, put_back
from tdserve.store.durability.watermark import SyncedStore
from tdserve.store.roots.root import Root

_log = logging.getLogger("tdserve.server")


def recover(root: Root) -> None:
    """Repairs a root if the power was lost since it was last in order. Call it before anything else is opened.

    Raises:
        TDServeError: It cannot be repaired now, for example because the disk is full. The next call starts again.
    """
    if not root.run.has_lost_power():
        return
    _log.warning(
        "the machine was restarted before %s was synced: what was written since the last sync is gone, or is "
        "reported as damaged; stores that were made since then are gone",
        root.path,
    )
    for loss in return_to_last_sync(root):
        _log.warning("%s", loss)


def return_to_last_sync(root: Root) -> list[str]:
    """Makes a root what it was at the last sync; returns what is lost, by store.

    Raises:
        TDServeError: It cannot be done now. The next call starts again.
    """
    with hold_page_checks():  # what the last sync has left may be damaged
        return _return_to_last_sync(root)


def _return_to_last_sync(root: Root) -> list[str]:
    if not put_back(root.synced_folder, root.catalog_folder):
        damaged = root.catalog_folder / DATA_FILE
        if damaged.exists():
            damaged.rename(damaged.with_name(f"{DATA_FILE}.lost"))
    losses = list[str]()
    with CatalogDB(root.catalog_folder) as db:
        forget_writers(db)
        specs = Specs(db, set)
        kept = set[str]()
        for _, content in db.scan("stores"):
            record = StoreRecord.from_bytes(content)
            exists, loss = _recover_store(root, db, specs, record)
            exists = exists and not _is_of_another(root, record)
            kept.update([record.name] if exists else ())
            losses += [loss] if loss else []
        for folder in root.list_store_folders():
            if not folder.name.startswith(".") and folder.name not in kept:
                aside = root.set_aside(folder.name)
                losses.append(f"{folder} is of no store that was synced; it is {aside} now")
        db.sync()
    Pass(str(root.catalog_folder), str(root.synced_folder)).run()
    return losses


def _recover_store(root: Root, db: CatalogDB, specs: Specs, record: StoreRecord) -> tuple[bool, str]:
    """Repairs a store; returns whether it still exists, and what is lost of it."""
    folder = root.store_folder(record.name)
    uid = record.uid.encode()
    if _is_packed(db, specs, folder, record):
        db.put("stores", record.name.encode(), replace(record, packed=True).to_bytes())
        return True, ""
    kind = KINDS[record.kind]
    if record.loading or not kind.is_folder_of(folder, record):
        with db.begin_transaction() as txn:
            txn.delete("stores", record.name.encode())
            txn.delete("states", uid)
        return False, "" if record.loading else f"store {record.name!r} was deleted, and is gone"
    try:
        lost = kind.repair(folder, record, db, specs)
    except TDServeError as error:
        _log.error("store %r cannot be repaired: %s", record.name, error)
        return True, ""
    return True, f"store {record.name!r}: {lost}" if lost else ""


def _is_of_another(root: Root, record: StoreRecord) -> bool:
    """Returns whether a later store of the same name has the folder of one whose content is in the catalog."""
    folder = root.store_folder(record.name)
    return folder.exists() and not KINDS[record.kind].is_folder_of(folder, record)


def _is_packed(db: CatalogDB, specs: Specs, folder: Path, record: StoreRecord) -> bool:
    """Returns whether a store has its content in the catalog, and nothing later has reached the disk."""
    if record.packed or db.get("packed", record.uid.encode()) is None:
        return record.packed
    kind = KINDS[record.kind]
    stored = kind.make_stored_spec(record, specs.get(record.fingerprint, record.order))
    store = SyncedStore.from_spec(stored, uid=record.uid, folder=str(folder), structure=record.structure)
    try:
        return not kind.has_synced_changes(store, first=FILLED if has_content(db, record) else 0)
    except TDServeError:  # no pass has covered its files
        return True


def forget_writers(db: CatalogDB) -> None:
    """Deletes all pending records but those of changes of structure, and of rows that were to leave: all writers of
    that time are gone, and what waited for a worker may be incomplete, so its rows are lost."""
    altered = {change.key for change in Restructured.load(db)}
    with db.begin_transaction() as txn:
        for key, _ in db.scan("pending"):
            if key not in altered and not key.startswith(DEPARTURE):
                txn.delete("pending", key)
