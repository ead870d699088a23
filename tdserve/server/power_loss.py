"""Recovery from a loss of power: only what is known to have reached the disk counts.

After a loss of power, any subset of the pages that were written since the last sync may be on the disk. Neither the
catalog nor a generation can be trusted then, since nothing tells whether their pages are of one moment. So the catalog
is replaced by its copy of the last sync, and rows and versions count only if they prove to be unchanged. All of this
can be repeated after a crash in the middle.
"""

from __future__ import annotations

import json
import logging
import secrets
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tdserve.base.errors import TDServeError
from tdserve.messages.row_sets import RowSet
from tdserve.rules.catalog import StoreRecord
from tdserve.rules.replay.ring import NAME_MASK
from tdserve.rules.weights import STEP_AFTER_LOSS
from tdserve.server.opening import FILLED, make_stored_spec
from tdserve.server.packed_stores import has_content
from tdserve.server.recovery.lost_rows import POWER_LOSS, Overwrite
from tdserve.server.recovery.restructured import Restructured
from tdserve.server.specs import Specs
from tdserve.store import object_folders
from tdserve.store.catalog_db import CatalogDB
from tdserve.store.entry_tables import skip_versions
from tdserve.store.environments import DATA_FILE
from tdserve.store.generations import FILE_NAME as GENERATION_FILE, Generations, is_of
from tdserve.store.root import Root
from tdserve.store.row_columns import open_column
from tdserve.store.sync_pass import Pass, put_back
from tdserve.store.value_copy import ValueCopy
from tdserve.store.version_marks import find_whole_versions, is_of_another
from tdserve.store.watermark import SyncedStore, Watermark, find_whole
from tdserve.structure.tree import Spec

_log = logging.getLogger("tdserve.server")


def recover(root: Root) -> None:
    """Repairs a root if the power was lost since it was last in order. Call it before anything else is opened.

    Raises:
        TDServeError: It cannot be repaired now, for example because the disk is full. The next call starts anew.
    """
    if not root.has_lost_power():
        return
    if not put_back(root.synced_folder, root.catalog_folder):
        damaged = root.catalog_folder / DATA_FILE
        if damaged.exists():
            damaged.rename(damaged.with_name(f"{DATA_FILE}.lost"))
    _log.warning(
        "the machine was started anew before %s was synced: what was written since the last sync is gone, or is "
        "reported as damaged; stores that were made since then are gone",
        root.path,
    )
    with CatalogDB(root.catalog_folder) as db:
        _forget_writers(db)
        specs = Specs(db, set)
        kept = set()
        for _, content in db.scan("stores"):
            record = StoreRecord.from_bytes(content)
            if _recover_store(root, db, specs, record):
                kept.add(record.name)
        for folder in sorted((root.path / "stores").iterdir()):
            if not folder.name.startswith(".") and folder.name not in kept:
                _log.warning("%s is of no store that was synced; it is %s now", folder, root.set_aside(folder.name))
        db.sync()
    Pass(str(root.catalog_folder), str(root.synced_folder)).run()


def _recover_store(root: Root, db: CatalogDB, specs: Specs, record: StoreRecord) -> bool:
    """Repairs a store; returns whether it still exists."""
    folder = root.store_folder(record.name)
    uid = record.uid.encode()
    if _is_packed(db, specs, folder, record):
        db.put("stores", record.name.encode(), replace(record, packed=True).to_bytes())
        return True
    is_there = _is_of_store(folder, record)
    if record.loading or not is_there:
        with db.begin_transaction() as txn:
            txn.delete("stores", record.name.encode())
            txn.delete("states", uid)
        if not record.loading:
            _log.warning("store %r was deleted, and is gone", record.name)
        return False
    try:
        if record.kind == "weights":
            num_lost = _recover_versions(db, folder, record.uid)
            what = "versions"
        elif record.kind == "keyed":
            _recover_entries(folder, record)
            num_lost, what = 0, "entries"
        else:
            stored = make_stored_spec(record, specs.get(record.fingerprint, record.order))
            num_lost = _recover_rows(db, folder, record, stored)
            what = "rows" if record.kind == "replay" else "rows, which are damaged until they are written again,"
    except TDServeError as error:
        _log.error("store %r cannot be repaired: %s", record.name, error)
        return True
    if num_lost:
        _log.warning("store %r: %d %s had not reached the disk", record.name, num_lost, what)
    return True


def _is_packed(db: CatalogDB, specs: Specs, folder: Path, record: StoreRecord) -> bool:
    """Returns whether a store has its content in the catalog, and nothing later has reached the disk."""
    if record.packed or db.get("packed", record.uid.encode()) is None:
        return record.packed
    stored = make_stored_spec(record, specs.get(record.fingerprint, record.order))
    try:
        store = SyncedStore.from_spec(stored, uid=record.uid, folder=str(folder), structure=record.structure)
        first = FILLED if has_content(db, record) else 0
        return int(Watermark.open(store, makes=False).generations.max()) <= first
    except TDServeError:  # no pass has covered its files
        return True


def _is_of_store(folder: Path, record: StoreRecord) -> bool:
    """Returns whether a folder belongs to this incarnation of the store; some of its files may be missing."""
    if record.kind == "weights":
        return folder.exists() and not is_of_another(folder / "versions", uid=record.uid)
    path = folder / GENERATION_FILE
    return is_of(path, uid=record.uid) if path.exists() and path.stat().st_size else folder.exists()


def _recover_rows(db: CatalogDB, folder: Path, record: StoreRecord, stored: Spec) -> int:
    """Repairs the rows of a store; returns how many were lost, without rows of a table that were never written."""
    seen = _read_generations(folder, record, stored)
    if record.adopted:
        is_whole, generations = seen[:-1] & 1 == 0, seen
    else:
        is_whole, generations = _find_synced_rows(folder, record, stored)
    if record.kind == "replay":
        state = json.loads(db.get("states", record.uid.encode()) or b"{}")
        sequence = open_column(folder, "sequence", np.dtype(np.int64), (record.capacity,))
        is_whole &= (generations[:-1] > 0) & (sequence <= int(state.get("last_sequence", state.get("inserts", 0))))
        for first, last in state.get("arriving", ()):  # of an extend that was not on record then
            is_whole &= (sequence <= first) | (sequence > last)
    was_written = (generations[:-1] > 0) | (seen[:-1] > 0)
    # All generations become numbers that nobody has seen: a remote client may know a lost row by its generation.
    step = 2 * (secrets.randbelow(1 << 33) + (1 << 22))
    moved = (((generations & NAME_MASK) | 1) - 1 + step) & NAME_MASK
    lost = np.flatnonzero(~is_whole & (was_written if record.kind == "replay" else True))
    moved[:-1][~was_written] = 0
    moved[lost] |= 1
    if record.kind == "tensordict":
        moved[-1] |= len(lost) > 0
        if len(lost):
            Overwrite(record.uid, POWER_LOSS, 0, RowSet.from_rows(lost), ()).save(db)
    Generations.replace(folder / GENERATION_FILE, uid=record.uid, values=moved, structure=record.structure)
    return len(lost)


def _recover_entries(folder: Path, record: StoreRecord) -> None:
    """Makes the entries of a keyed store those of its last pass. Versions of later ones are not used again."""
    ValueCopy(folder).restore()
    skip_versions(object_folders.get_folder(folder, 0), max_bytes=record.max_object_bytes)
    generations = np.zeros(record.num_rows + 1, np.int64)
    Generations.replace(folder / GENERATION_FILE, uid=record.uid, values=generations, structure=record.structure)


def _find_synced_rows(folder: Path, record: StoreRecord, stored: Spec) -> tuple[NDArray[np.bool_], NDArray[np.int64]]:
    store = SyncedStore.from_spec(stored, uid=record.uid, folder=str(folder), structure=record.structure)
    if store.values:
        ValueCopy(folder).restore()
    try:
        return find_whole(store)
    except TDServeError as error:
        _log.warning("store %r: nothing tells which rows had reached the disk: %s", record.name, error)
        return np.zeros(store.num_rows, np.bool_), np.zeros(store.num_rows + 1, np.int64)


def _read_generations(folder: Path, record: StoreRecord, stored: Spec) -> NDArray[np.int64]:
    """Returns the content of the generation file, correct or not; zeros if it is unusable."""
    num_rows = stored.num_rows
    try:
        values = Generations.open(folder / GENERATION_FILE, uid=record.uid).values
    except TDServeError:
        values = np.zeros(0, np.int64)
    return values.copy() if len(values) == num_rows + 1 else np.zeros(num_rows + 1, np.int64)


def _recover_versions(db: CatalogDB, folder: Path, uid: str) -> int:
    """Repairs the versions of a weights store; returns how many were lost."""
    state = json.loads(db.get("states", uid.encode()) or b"{}")
    if not state:
        return 0
    found = find_whole_versions(folder / "versions", uid=uid)
    whole = {number: json.loads(record) for number, record in sorted(found.items())}
    num_lost = len({kept[0] for kept in state["kept"]} - set(whole))
    state["kept"] = [record for record, _ in whole.values()]
    state["orders"] = [[number, order] for number, (_, order) in whole.items() if order]
    state["free"], state["checksums"] = [], []
    # Remote readers may know later versions: a number that anybody has seen is never given again.
    state["last_begun"] = max(state["last_begun"], *whole, 0) + STEP_AFTER_LOSS
    with db.begin_transaction() as txn:
        txn.put("states", uid.encode(), json.dumps(state).encode())
    return num_lost


def _forget_writers(db: CatalogDB) -> None:
    """Deletes all pending records but those of changes of structure: all writers of that time are gone, and what waited
    for a worker may be incomplete, so its rows are lost."""
    altered = {change.key for change in Restructured.load(db)}
    with db.begin_transaction() as txn:
        for key, _ in db.scan("pending"):
            if key not in altered:
                txn.delete("pending", key)
