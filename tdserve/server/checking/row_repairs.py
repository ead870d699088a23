"""Repairs of stores with rows. No process has them open."""

from __future__ import annotations

import os
import shutil
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tdserve.messages.row_sets import RowSet
from tdserve.rules.catalog import StoreRecord
from tdserve.rules.kv.entry_changes import Counters
from tdserve.server.recovery.lost_rows import POWER_LOSS, Overwrite
from tdserve.store import object_folders
from tdserve.store.catalog_db import CatalogDB
from tdserve.store.entry_tables import STEP_AFTER_LOSS, read_header, write_counters
from tdserve.store.environment_scan import DamagedRecord, scan_here
from tdserve.store.environments import DATA_FILE
from tdserve.store.faults import convert_os_errors
from tdserve.store.generations import FILE_NAME as GENERATION_FILE, Generations
from tdserve.store.objects import Objects
from tdserve.store.record_copy import copy_records
from tdserve.store.root import Root
from tdserve.store.watermark import SyncedStore, Watermark
from tdserve.structure.tree import Spec


def drop_rows(root: Root, record: StoreRecord, rows: Sequence[int]) -> str:
    """Takes damaged rows out of a table; in a tensordict store they are reported as damaged until they are written."""
    generations = Generations.open(root.store_folder(record.name) / GENERATION_FILE, uid=record.uid, writable=True)
    numbers = np.asarray(rows, np.int64)
    generations.values[numbers] |= 1
    generations.close()
    if record.capacity:
        return f"{len(rows)} rows were dropped"
    with CatalogDB(root.catalog_folder) as db:
        Overwrite(record.uid, POWER_LOSS, 0, RowSet.from_rows(numbers), ()).save(db)
    return f"{len(rows)} rows are reported as damaged until they are written again"


def drop_values(folder: Path, record: StoreRecord, damaged: Collection[DamagedRecord]) -> None:
    """Deletes damaged values of rows."""
    values = _find_values(folder, record)
    copy_records(values)  # as in drop_entries
    with Objects(values, writable=True, max_bytes=record.max_object_bytes) as objects:
        _delete(objects, [each for each in damaged if each.table == "values"])


def drop_entries(folder: Path, record: StoreRecord, num_missing: int) -> str:
    """Deletes damaged entries of a keyed store, and what other tables have of them; counts the others again.

    Args:
        folder: Folder of its values.
        num_missing: How many entries cannot be found.
    """
    copy_records(folder)  # LMDB ends a process that changes some damaged pages
    damaged = scan_here(folder / DATA_FILE).damaged  # without those that only could not be found in the old pages
    with Objects(folder, writable=True, max_bytes=record.max_object_bytes) as objects:
        _delete(objects, damaged)
        tables = {name: objects.open_table(name) for name in ("entries", "ages", "expiries", "counters")}

        def settle(txn: Any) -> None:
            counters = Counters()
            for key, content in txn.cursor(db=tables["entries"]):
                version, _, age = read_header(content)
                counters.last_version = max(counters.last_version, version)
                counters.last_age = max(counters.last_age, age)
                counters.nbytes += len(key) + len(content)
            counters.last_version += STEP_AFTER_LOSS
            for age, key in list(txn.cursor(db=tables["ages"])):
                if txn.get(bytes(key), db=tables["entries"]) is None:
                    txn.delete(bytes(age), db=tables["ages"])
            write_counters(txn, tables["counters"], counters)

        objects.commit(settle, asked_bytes=0)
        objects.sync()
    num_entries = sum(each.table == "entries" for each in damaged)
    missing = f"; {num_missing} others could not be found and are gone" if num_missing else ""
    return f"{num_entries} entries were dropped{missing}"


def _delete(objects: Objects, damaged: Collection[DamagedRecord]) -> None:
    # opened before the transaction: opening one begins a transaction of its own, and would wait for this one
    tables = {name: objects.open_table(name) for name in {each.table for each in damaged}}

    def delete(txn: Any) -> None:
        for each in damaged:
            if tables[each.table] is not None and each.key:
                txn.delete(each.key, db=tables[each.table])

    objects.commit(delete, asked_bytes=0)


def _find_values(folder: Path, record: StoreRecord) -> Path:
    generations = Generations.open(folder / GENERATION_FILE, uid=record.uid)
    epoch = generations.objects_epoch
    generations.close()
    return object_folders.get_folder(folder, epoch)


def restore_generations(folder: Path, record: StoreRecord, stored: Spec) -> str:
    """Replaces a damaged file of generations by those of the last sync."""
    store = SyncedStore.from_spec(stored, uid=record.uid, folder=str(folder), structure=record.structure)
    values = Watermark.open(store, makes=False).generations.copy()
    epochs = [path.suffix[1:] for path in object_folders.list_folders(folder)]
    epoch = max((int(each) for each in epochs if each.isdecimal()), default=0)
    Generations.replace(folder / GENERATION_FILE, uid=record.uid, values=values, structure=record.structure)
    generations = Generations.open(folder / GENERATION_FILE, uid=record.uid, writable=True)
    generations.move_objects(epoch)
    generations.close()
    return "as of the last sync"


def remove_synced(path: Path) -> str:
    """Removes a file of the last sync, which the next one makes anew."""
    target = path if path.name == "synced.memmap" else path.parent
    with convert_os_errors(target):
        if target.is_dir():
            shutil.rmtree(target)
        else:
            target.unlink(missing_ok=True)
    return "it was removed, and is made anew"


def write_text(path: Path, text: bytes) -> str:
    """Writes a file of metadata again."""
    with convert_os_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text)
    return "it was written again"


def resize(path: Path, nbytes: int) -> str:
    """Gives a file of tensors its size; what is missing becomes zero, and its rows are compared next."""
    with convert_os_errors(path, asked=nbytes):
        path.parent.mkdir(parents=True, exist_ok=True)
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
        try:
            os.ftruncate(fd, nbytes)
            if nbytes:
                os.posix_fallocate(fd, 0, nbytes)
        finally:
            os.close(fd)
    return "it has its size again"
