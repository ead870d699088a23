"""Damage of LMDB's pages at which it ends the process that comes there."""

from __future__ import annotations

import struct
from mmap import PAGESIZE
from pathlib import Path

TRANSACTION_AT = 144
FREE_PAGES_ROOT_AT, TABLES_ROOT_AT = 80, 128
"""Places in each of the first two pages."""

FIRST_RECORD_AT = 16
"""Place in a page of records."""


def damage_free_pages(path: Path) -> None:
    """Has the newest list of free pages lead beyond the end of the file: a writer or a copy that looks there ends by
    SIGBUS."""
    _damage(path, FREE_PAGES_ROOT_AT)


def damage_tables(path: Path) -> None:
    """The same of the table of tables, which whoever opens a table reads."""
    _damage(path, TABLES_ROOT_AT)


def _damage(path: Path, root_at: int) -> None:
    content = bytearray(path.read_bytes())
    newest = max((0, PAGESIZE), key=lambda page: struct.unpack_from("<Q", content, page + TRANSACTION_AT))
    (root,) = struct.unpack_from("<Q", content, newest + root_at)
    struct.pack_into("<H", content, root * PAGESIZE + FIRST_RECORD_AT, 0xFFF0)
    path.write_bytes(content)
