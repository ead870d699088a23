"""Damage of LMDB's pages: LMDB ends the process that reads such a page."""

from __future__ import annotations

import os
import struct
from mmap import PAGESIZE
from pathlib import Path

import lmdb

TRANSACTION_AT = 144
FREE_PAGES_ROOT_AT, TABLES_ROOT_AT = 80, 128
"""Places in each of the first two pages."""

FLAGS_IN_RECORD_AT, ROOT_IN_RECORD_AT = 4, 40
"""Places in the record of a table."""

PAGE_FLAGS_AT, LOWER_AT, FIRST_RECORD_AT = 10, 12, 16
"""Places in a page of records."""


def damage_free_pages(path: Path) -> None:
    """Makes the newest list of free pages point beyond the end of the file: a writer or a copy that reads it ends by
    SIGBUS."""
    _damage(path, FREE_PAGES_ROOT_AT)


def damage_tables(path: Path) -> None:
    """Does the same to the table of tables, which is read whenever a table is opened."""
    _damage(path, TABLES_ROOT_AT)


def damage_table(path: Path, name: str) -> None:
    """Does the same to a named table."""
    record = read_table_record(path, name)
    _damage_page(path, bytearray(path.read_bytes()), struct.unpack_from("<Q", record, ROOT_IN_RECORD_AT)[0])


def cut_to_first_pages(path: Path) -> None:
    """Keeps only the two pages that lead to all others: a process that follows them ends by SIGBUS."""
    os.truncate(path, 2 * PAGESIZE)


def make_branch_of_one(path: Path) -> None:
    """Makes the root of the table of tables a branch with only one page: a process that reads it ends by SIGABRT."""
    content = bytearray(path.read_bytes())
    page = _read_root(content, TABLES_ROOT_AT)
    struct.pack_into("<HH", content, page * PAGESIZE + PAGE_FLAGS_AT, 1, FIRST_RECORD_AT + 2)
    path.write_bytes(content)


def shorten_root(path: Path, name: str) -> None:
    """Makes the root of a table lead to one page less: entries below that page cannot be found any more."""
    content = bytearray(path.read_bytes())
    (page,) = struct.unpack_from("<Q", read_table_record(path, name), ROOT_IN_RECORD_AT)
    (lower,) = struct.unpack_from("<H", content, page * PAGESIZE + LOWER_AT)
    struct.pack_into("<H", content, page * PAGESIZE + LOWER_AT, lower - 2)
    path.write_bytes(content)


def change_order(path: Path, name: str) -> None:
    """Makes the record of a table say that keys are compared from their ends: most keys are not found any more."""
    content, record = bytearray(path.read_bytes()), read_table_record(path, name)
    place = content.find(record)
    while place >= 0:
        content[place + FLAGS_IN_RECORD_AT] ^= 2
        place = content.find(record, place)
    path.write_bytes(content)


def read_table_record(path: Path, name: str) -> bytes:
    """Returns the record of a table."""
    with lmdb.open(str(path), subdir=False, lock=False, readonly=True, max_dbs=1) as env, env.begin() as txn:
        record = txn.get(name.encode())
    assert record is not None
    return record


def _damage(path: Path, root_at: int) -> None:
    content = bytearray(path.read_bytes())
    _damage_page(path, content, _read_root(content, root_at))


def _read_root(content: bytearray, root_at: int) -> int:
    newest = max((0, PAGESIZE), key=lambda page: struct.unpack_from("<Q", content, page + TRANSACTION_AT))
    root: int = struct.unpack_from("<Q", content, newest + root_at)[0]
    return root


def _damage_page(path: Path, content: bytearray, page: int) -> None:
    struct.pack_into("<H", content, page * PAGESIZE + FIRST_RECORD_AT, 0xFFF0)
    path.write_bytes(content)
