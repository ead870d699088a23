"""Repairs of the catalog, from the copy that each sync makes of it, and of folders that it does not name."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory

from tdserve.base.errors import CorruptDataError, TDServeError
from tdserve.rules.catalog import StoreRecord
from tdserve.server.catalog.kept_records import bring_back
from tdserve.server.catalog.moments import read_moments
from tdserve.server.checking.findings import REMOVED, Outcome
from tdserve.server.durability.power_loss import forget_writers, return_to_last_sync
from tdserve.server.kinds.all_kinds import KINDS
from tdserve.server.kinds.keyed_kind import KeyedKind
from tdserve.server.open_store.specs import Specs, make_keys
from tdserve.store.database.catalog_db import CatalogDB, Table, Transaction
from tdserve.store.database.environments import DATA_FILE, LOCK_FILE
from tdserve.store.disk.faults import convert_os_errors
from tdserve.store.disk.files import FRESH_SUFFIX, sync_file
from tdserve.store.durability.environment_scan import EnvironmentScanner
from tdserve.store.durability.record_copy import copy_records
from tdserve.store.durability.sync_pass import COPY_FILE, put_back
from tdserve.store.durability.watermark import SyncedStore, sync_store
from tdserve.store.roots.record_file import KeptRecord
from tdserve.store.roots.root import Root
from tdserve.store.rows.generations import FILE_NAME as GENERATION_FILE, Generations, is_of
from tdserve.store.values import object_folders
from tdserve.store.values.objects import Objects

_LOSSES: dict[Table, str] = {
    "stores": "what was on record of store {!r}",
    "specs": "the structure {!r} of stores",
    "states": "versions, counts and changed settings of store {!r}",
    "packed": "the content of store {!r}",
}
"""Tables whose records are taken from the copy, and what is lost if it has none; those of others are of requests and
writers that have ended."""


def put_back_catalog(root: Root) -> Outcome:
    """Replaces a catalog that cannot be read by its copy, and what the stores have of rows and versions by what they
    had at the last sync. Entries of keyed stores stay as they are, where they are whole."""
    if not (root.synced_folder / COPY_FILE).exists():
        expected = "a copy of the catalog, as each sync makes one"
        raise CorruptDataError(path=str(root.synced_folder / COPY_FILE), expected=expected, actual="none")
    is_orderly = root.run.has_ended_in_order()
    if _is_copy_older(root):
        return _put_back_older(root)
    kept = _sync_live_entries(root)
    root.run.note_lost_power()  # after a crash in between, the next start completes this
    losses = return_to_last_sync(root)
    root.run.note(is_synced=is_orderly)  # else the checksums of files are of an earlier run
    if is_orderly and not losses:
        return Outcome("as of the last sync, with which the server ended in order: nothing is lost")
    stay = f", except entries of {', '.join(map(repr, kept))}" if kept else ""
    since = [] if is_orderly else [f"what was written after the last sync{stay}"]
    return Outcome("as of the last sync", losses=[*since, *losses])


def _is_copy_older(root: Root) -> bool:
    """Returns whether a store's folder has a record of a moment that the copy has not had, as if that was put back from
    earlier: to return to it would lose what the folders have."""
    with _CatalogCopy(root) as copy:
        if copy is None:
            return False
        moments = read_moments(copy)
        for folder in root.list_store_folders():
            if folder.name.startswith("."):
                continue
            with suppress(TDServeError):
                kept = KeptRecord.load(folder)
                if kept is not None and not moments.has(kept.moment):
                    return True
    return False


def _put_back_older(root: Root) -> Outcome:
    """Replaces a catalog that cannot be read by a copy of an earlier moment; the next look at the root brings stores
    back by the later records in their folders."""
    put_back(root.synced_folder, root.catalog_folder)
    with CatalogDB(root.catalog_folder) as db:
        forget_writers(db)
        db.sync()
    lost = "since then, stores without a folder of their own, as small ones are before their first use"
    return Outcome("as of an earlier sync, for the later records in the folders of stores", losses=[lost])


def begin_catalog(root: Root) -> Outcome:
    """Begins a new catalog in the place of one that is lost; the next look at the root brings stores back by the
    records in their folders."""
    path = root.catalog_folder / DATA_FILE
    with convert_os_errors(path):
        root.catalog_folder.mkdir(exist_ok=True)
        (root.catalog_folder / LOCK_FILE).unlink(missing_ok=True)
        if path.exists():
            os.replace(path, path.with_name(f"{DATA_FILE}.lost"))
    with CatalogDB(root.catalog_folder) as db:
        db.sync()
    lost = "stores without a folder of their own, as small ones are before their first use"
    return Outcome("a new one was begun, for the records in the folders of stores", losses=[lost])


def _sync_live_entries(root: Root) -> list[str]:
    """Makes a pass over each keyed store whose entries are whole; returns their names."""
    kept = list[StoreRecord]()
    with _CatalogCopy(root) as copy, EnvironmentScanner() as scanner:
        if copy is None:
            return []
        for key in copy.list_keys("stores"):
            with suppress(TDServeError):
                record = StoreRecord.from_bytes(copy.get("stores", key) or b"")
                folder = root.store_folder(record.name)
                if record.kind == KeyedKind.name and _has_whole_entries(folder, record, scanner):
                    spec = Specs(copy, set).get(record.fingerprint, record.order)
                    stored = KINDS[record.kind].make_stored_spec(record, spec)
                    uid, structure = record.uid, record.structure
                    sync_store(SyncedStore.from_spec(stored, uid=uid, folder=str(folder), structure=structure))
                    kept.append(record)
    _record_files(root, [record for record in kept if record.packed])
    return [record.name for record in kept]


def _record_files(root: Root, records: Sequence[StoreRecord]) -> None:
    """Records in the copy of the catalog that stores have files: of a packed one the files would not count."""
    if not records:
        return
    copy = root.synced_folder / COPY_FILE
    fresh = copy.with_name(COPY_FILE + FRESH_SUFFIX)
    with TemporaryDirectory(prefix="tdserve-check-") as folder, convert_os_errors(copy):
        shutil.copyfile(copy, Path(folder, DATA_FILE))
        with CatalogDB(folder) as db, db.begin_transaction() as txn:
            for record in records:
                txn.put("stores", record.name.encode(), record.with_files().to_bytes())
        shutil.copyfile(Path(folder, DATA_FILE), fresh)
        sync_file(fresh)
        os.replace(fresh, copy)
    sync_file(root.synced_folder)


def _has_whole_entries(folder: Path, record: StoreRecord, scanner: EnvironmentScanner) -> bool:
    """Returns whether a folder has entries of this store, and all of them are whole."""
    if not is_of(folder / GENERATION_FILE, uid=record.uid):
        return False
    generations = Generations.open(folder / GENERATION_FILE, uid=record.uid)
    values = object_folders.get_folder(folder, generations.objects_epoch)
    generations.close()
    if not Objects.exists(values):
        return False
    scanned = scanner.scan(values / DATA_FILE)
    return not (scanned.failure or scanned.damaged or scanned.broken_page)


def put_back_records(root: Root, table: Table, keys: Sequence[bytes]) -> Outcome:
    """Takes damaged records from the copy; deletes those that it does not have."""
    num_found, losses, is_orderly = 0, list[str](), root.run.has_ended_in_order()
    copy_records(root.catalog_folder)  # LMDB refuses to change some damaged pages, or ends the process
    with _CatalogCopy(root) as copy, CatalogDB(root.catalog_folder) as db:
        stores = {record.uid: record.name for record in read_records(db)}
        with db.begin_transaction() as txn:
            for key in filter(None, keys):
                content = None
                if copy is not None and table in _LOSSES:
                    with suppress(TDServeError):
                        content = copy.get(table, key)
                        if content is not None and table == "stores":
                            content = _fit_record(root, content)
                if content is None:
                    txn.delete(table, key)
                    losses += _describe_loss(table, key, stores)
                else:
                    txn.put(table, key, content)
                    num_found += 1
                    if table == "states" and not is_orderly:
                        losses += [f"{loss} since the last sync" for loss in _describe_loss(table, key, stores)]
    done = f"{num_found} records as of the last sync, {len(keys) - num_found} were deleted"
    return Outcome(done, losses=losses)


def _fit_record(root: Root, content: bytes) -> bytes | None:
    """Returns the record of a store from the copy, as its folder is now; None if that is of another store: the name may
    have been used again since."""
    record = StoreRecord.from_bytes(content)
    folder = root.store_folder(record.name)
    if record.packed and not folder.exists():
        return content
    if not KINDS[record.kind].is_folder_of(folder, record):
        return None
    return record.with_files().to_bytes() if record.packed else content


def _describe_loss(table: Table, key: bytes, stores: Mapping[str, str]) -> list[str]:
    """Returns what is lost with a record, in a line; nothing if no store needs it.

    Args:
        stores: Names by uid.
    """
    if table not in _LOSSES:
        return []
    if table == "specs":
        return [_LOSSES[table].format(key.hex()[:16])]
    shown = key.decode("utf-8", "backslashreplace")
    name = shown if table == "stores" else stores.get(shown)
    return [] if name is None else [_LOSSES[table].format(name)]


def read_records(db: CatalogDB) -> list[StoreRecord]:
    """Returns the records of all stores that are whole."""
    found = []
    for key in db.list_keys("stores"):
        with suppress(TDServeError):
            content = db.get("stores", key)
            if content is not None:
                found.append(StoreRecord.from_bytes(content))
    return found


def take_back(root: Root, name: str) -> Outcome:
    """Makes a folder the store again that it was at the last sync; sets it aside if it was not a store."""
    with suppress(TDServeError):
        losses = _bring_back(root, name)
        if losses is not None:
            return Outcome("it is a store again, by the record in its folder", losses=losses)
    folder = root.store_folder(name)
    with _CatalogCopy(root) as copy:
        content = None if copy is None else copy.get("stores", name.encode())
        record = None if content is None else StoreRecord.from_bytes(content)
        if copy is not None and record is not None and KINDS[record.kind].is_folder_of(folder, record):
            with CatalogDB(root.catalog_folder) as db, db.begin_transaction() as txn:
                _copy_record(copy, record, txn)
            done = "it is a store again, with settings and counts as of the last sync"
            return Outcome(done, losses=_describe_since_sync(root, name))
    return Outcome(f"it is {root.set_aside(name)} now", is_set_aside=True)


def _bring_back(root: Root, name: str) -> list[str] | None:
    losses = bring_back(root, name)
    if losses is None:
        return None
    return [*_describe_since_sync(root, name), *losses]


def _describe_since_sync(root: Root, name: str) -> list[str]:
    """Returns what is lost of a store whose settings and counts are as of the last sync."""
    return [] if root.run.has_ended_in_order() else [f"{_LOSSES['states'].format(name)} since the last sync"]


def take_later(root: Root, record: StoreRecord, own: StoreRecord) -> Outcome:
    """Makes a folder the store again that its own record describes, in the place of another of its name.

    Args:
        record: The catalog's.
        own: The folder's.
    """
    losses = _bring_back(root, record.name)
    if losses is None:
        path = str(root.store_folder(record.name))
        raise CorruptDataError(path=path, expected="the files of its own record", actual="those of another")
    if own.uid != record.uid and own.created_s < record.created_s:  # else that was deleted before this one was made
        losses.append(f"the content of the later store {record.name!r} that the catalog had, whose files are not here")
    return Outcome("it is the store of the record in its folder", losses=losses)


def _copy_record(copy: CatalogDB, record: StoreRecord, txn: Transaction) -> None:
    wanted: list[tuple[Table, bytes]] = [("stores", record.name.encode()), ("states", record.uid.encode())]
    wanted += [("specs", key) for key in make_keys(record.fingerprint, record.order) if key]
    for table, key in wanted:
        content = copy.get(table, key)
        if content is not None:
            txn.put(table, key, content)


def forget_catalog_copy(root: Root) -> str:
    """Removes a damaged copy of the catalog."""
    (root.synced_folder / COPY_FILE).unlink(missing_ok=True)
    return REMOVED


def remove_file(path: Path) -> str:
    """Removes a leftover, a file or a folder."""
    with convert_os_errors(path):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
    return "it was removed"


class _CatalogCopy:
    """The copy of the last sync, in a folder of its own, since LMDB needs a lock file beside it."""

    def __init__(self, root: Root) -> None:
        self._path = root.synced_folder / COPY_FILE
        self._folder = TemporaryDirectory(prefix="tdserve-check-")
        self._db: CatalogDB | None = None

    def __enter__(self) -> CatalogDB | None:
        if not self._path.exists():
            return None
        shutil.copyfile(self._path, Path(self._folder.name, DATA_FILE))
        Path(self._folder.name, LOCK_FILE).touch()
        self._db = CatalogDB(self._folder.name, is_read_only=True)
        return self._db

    def __exit__(self, *_: object) -> None:
        if self._db is not None:
            self._db.close()
        self._folder.cleanup()
