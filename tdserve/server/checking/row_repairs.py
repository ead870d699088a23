"""Repairs of stores with rows. No process has them open."""

from __future__ import annotations

import os
import shutil
from collections.abc import Collection, Sequence
from contextlib import suppress
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tdserve.base.errors import TDServeError
from tdserve.messages.row_sets import RowSet
from tdserve.rules.catalog import StoreRecord
from tdserve.server.checking.findings import REMOVED, Outcome
from tdserve.server.recovery.lost_rows import POWER_LOSS, Overwrite
from tdserve.store.database.catalog_db import CatalogDB
from tdserve.store.database.environments import DATA_FILE
from tdserve.store.disk.faults import convert_os_errors
from tdserve.store.durability.environment_scan import DamagedRecord, scan_here
from tdserve.store.durability.record_copy import copy_records
from tdserve.store.durability.watermark import SyncedStore, Watermark
from tdserve.store.roots.root import Root
from tdserve.store.rows.generations import FILE_NAME as GENERATION_FILE, Generations, read_generations
from tdserve.store.values import object_folders
from tdserve.store.values.entry_tables import DERIVED_TABLES, TABLES, write_derived
from tdserve.store.values.object_rows import COMMON, NAME_BYTES
from tdserve.store.values.objects import Objects
from tdserve.structure.trees.tree import Spec

_PLACE_BYTES = 8
"""Size of the number of an element in the key of a value."""


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


def drop_values(root: Root, record: StoreRecord, stored: Spec) -> str:
    """Deletes damaged values of rows, and takes these rows out of the store."""
    folder = _find_values(root.store_folder(record.name), record)
    damaged = _copy_whole(folder)
    with Objects(folder, writable=True, max_bytes=record.max_object_bytes) as objects:
        _delete(objects, [each for each in damaged if each.table == "values"])
    rows = {row for each in damaged if (row := find_row(each, stored)) is not None}
    return drop_rows(root, record, sorted(rows)) if rows else "no row had to be dropped"


def find_row(damaged: DamagedRecord, stored: Spec) -> int | None:
    """Returns the number of the row that a value belongs to; None if several use it, or its key is damaged."""
    place = damaged.key[NAME_BYTES:]
    if damaged.table != "values" or place == COMMON or len(place) != _PLACE_BYTES:
        return None
    row = (int.from_bytes(place, "big") - 1) // max(prod(stored.batch_size[1:]), 1)
    return row if 0 <= row < stored.num_rows else None


def drop_entries(folder: Path, record: StoreRecord, num_missing: int) -> str:
    """Deletes damaged entries of a keyed store, and rebuilds the tables that follow from the entries.

    Args:
        folder: Folder of its values.
        num_missing: How many entries cannot be found.
    """
    damaged = _copy_whole(folder, emptied=DERIVED_TABLES)
    with Objects(folder, writable=True, max_bytes=record.max_object_bytes) as objects:
        _delete(objects, damaged)
        tables = {name: objects.open_table(name) for name in TABLES}
        objects.commit(partial(write_derived, tables=tables), asked_bytes=0)
        objects.sync()
    num_entries = sum(each.table == "entries" for each in damaged)
    missing = f"; {num_missing} others could not be found and are gone" if num_missing else ""
    return f"{num_entries} entries were dropped{missing}"


def _copy_whole(folder: Path, *, emptied: Collection[str] = ()) -> tuple[DamagedRecord, ...]:
    """Copies all records to new pages, since LMDB ends a process that changes some damaged pages; returns the damaged
    ones there, without those that only could not be found in the old pages."""
    copy_records(folder, emptied=emptied)
    return scan_here(folder / DATA_FILE).damaged


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


def restore_generations(root: Root, record: StoreRecord, stored: Spec) -> Outcome:
    """Replaces a damaged file of generations: by its own if only its header is damaged, else by those of the last sync.

    After an orderly end those of the last sync are the last ones.
    """
    folder = root.store_folder(record.name)
    store = SyncedStore.from_spec(stored, uid=record.uid, folder=str(folder), structure=record.structure)
    is_orderly = root.run.has_ended_in_order()
    own = None if is_orderly else _find_own_generations(store)
    values = Watermark.open(store, makes=False).generations.copy() if own is None else own
    epochs = [path.suffix[1:] for path in object_folders.list_folders(folder)]
    epoch = max((int(each) for each in epochs if each.isdecimal()), default=0)
    Generations.replace(
        folder / GENERATION_FILE,
        uid=record.uid,
        values=values,
        structure=record.structure,
        former_version=record.former_version,
    )
    generations = Generations.open(folder / GENERATION_FILE, uid=record.uid, writable=True)
    generations.move_objects(epoch)
    generations.close()
    if own is not None:
        return Outcome("its header was written again; what it has of the rows stays")
    lost = f"rows of store {record.name!r} that were written after the last sync"
    return Outcome("as of the last sync", losses=[] if is_orderly else [lost])


def _find_own_generations(store: SyncedStore) -> NDArray[np.int64] | None:
    """Returns what a file of generations has behind a damaged header; None if it can be seen that this is damaged too:
    generations only grow."""
    own = read_generations(Path(store.folder, GENERATION_FILE), store.num_rows + 1, store.structure)
    if own is None:
        return None
    least: NDArray[np.int64] | int = 0
    with suppress(TDServeError):  # no sync has covered it
        least = Watermark.open(store, makes=False).generations
    return own if bool(np.all(own >= least)) else None


def remove_synced(path: Path) -> str:
    """Removes a file of the last sync, which the next one makes again."""
    target = path if path.name == "synced.memmap" else path.parent
    with convert_os_errors(target):
        if target.is_dir():
            shutil.rmtree(target)
        else:
            target.unlink(missing_ok=True)
    return REMOVED


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
