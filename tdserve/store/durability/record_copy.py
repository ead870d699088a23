"""Copies records of LMDB environments one by one: all of a damaged one into new pages, or some from an earlier copy.

LMDB's own copy reads more than the records, such as the list of free pages, and ends the process if that is damaged.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

import lmdb

from tdserve.store.database.environments import DATA_FILE, MAX_TABLES
from tdserve.store.disk.faults import convert_os_errors, lmdb_faults
from tdserve.store.disk.files import FRESH_SUFFIX, sync_file
from tdserve.store.disk.sealed import is_whole
from tdserve.store.durability.environment_scan import DamagedRecord

_RECORDS_AT_ONCE = 10_000
"""Records of one transaction: its changed pages stay in memory until it ends."""

_ROOM = 2
"""How much larger the map is than the damaged file: new pages may be filled less than the old ones."""


def copy_records(folder: Path, *, emptied: Collection[str] = ()) -> str:
    """Replaces an environment, which no process has open, by a copy of its records; returns what was done.

    Args:
        folder: Folder of the environment.
        emptied: Tables that are not read, and are empty in the copy.

    Raises:
        CapacityError: The disk is full.
        CorruptDataError: Records cannot be read. Nothing was changed.
    """
    path = folder / DATA_FILE
    fresh = folder / (DATA_FILE + FRESH_SUFFIX)
    fresh.unlink(missing_ok=True)
    with convert_os_errors(path):
        max_bytes = max(path.stat().st_size * _ROOM, 1 << 20)
    try:
        with (
            lmdb_faults(folder, max_bytes=max_bytes, asked=max_bytes // _ROOM),
            _open(path, readonly=True) as old,
            _open(fresh, map_size=max_bytes, sync=False) as new,
            old.begin(buffers=True) as txn,
        ):
            for name in [bytes(each) for each in txn.cursor().iternext(values=False)]:
                table = new.open_db(name)
                if name.decode() not in emptied:
                    _copy_table(txn, old.open_db(name, txn=txn, create=False), new, table)
        with convert_os_errors(fresh):
            sync_file(fresh)
            os.replace(fresh, path)
    finally:
        fresh.unlink(missing_ok=True)
    return "its records were copied to new pages"


def put_back_whole(path: Path, before: Path, damaged: Iterable[DamagedRecord]) -> None:
    """Replaces records that are damaged by those of an earlier copy, where they are whole there.

    Args:
        path: A copy of an environment, which no process has open.
        before: The earlier copy.
        damaged: Records that may be damaged.

    Raises:
        CorruptDataError, CapacityError: A copy cannot be read, or there is no room.
    """
    max_bytes = path.stat().st_size * _ROOM
    with (
        lmdb_faults(path, max_bytes=max_bytes),
        _open(before, readonly=True) as old,
        _open(path, map_size=max_bytes) as new,
        old.begin() as reading,
        new.begin(write=True) as writing,
    ):
        names = [bytes(each).decode() for each in reading.cursor().iternext(values=False)]
        for each in damaged:
            if each.table not in names or not each.key:
                continue
            table = new.open_db(each.table.encode(), txn=writing, create=False)
            found = writing.get(each.key, db=table)
            earlier = reading.get(each.key, db=old.open_db(each.table.encode(), txn=reading, create=False))
            is_damaged = found is not None and not is_whole(each.key, found)
            if is_damaged and earlier is not None and is_whole(each.key, earlier):
                writing.put(each.key, earlier, db=table)


def _open(path: Path, **settings: Any) -> lmdb.Environment:
    # Without locks: no other process uses either file, and a lock file would stay beside the new one.
    return lmdb.open(os.fspath(path), subdir=False, lock=False, max_dbs=MAX_TABLES, readahead=False, **settings)


def _copy_table(txn: lmdb.Transaction, table: Any, new: lmdb.Environment, new_table: Any) -> None:
    records = iter(txn.cursor(db=table))
    is_done = False
    while not is_done:
        is_done = True
        with new.begin(write=True, db=new_table) as writing:
            for number, (key, value) in enumerate(records, start=1):
                writing.put(key, value)
                if number == _RECORDS_AT_ONCE:
                    is_done = False
                    break
