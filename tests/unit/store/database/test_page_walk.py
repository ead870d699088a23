from __future__ import annotations

import os
import random
import struct
from collections.abc import Iterator
from mmap import PAGESIZE
from pathlib import Path
from typing import Any

import lmdb
import pytest

from tdserve.base.errors import CorruptDataError
from tdserve.store.database import environments
from tdserve.store.database.page_walk import find_broken_page, read_metas

LENGTHS = (1, 10, 100, 1000, 5000, 40_000)
FLAGS_AT, LIMITS_AT, FIRST_RECORD_AT = 10, 12, 16
"""Places in the header of a page."""
BRANCH, LEAF, OVERFLOW = 1, 2, 4


def write_randomly(folder: Path, *, seed: int, num_commits: int = 12) -> Path:
    """Writes and deletes records of two tables, in commits of which a few are given up."""
    rng = random.Random(seed)
    with lmdb.open(str(folder), map_size=1 << 27, sync=False, max_dbs=2) as env:
        tables = [env.open_db(name) for name in (b"a", b"b")]
        keys = list[tuple[bytes, Any]]()
        for _ in range(num_commits):
            with env.begin(write=True) as txn:
                for _ in range(rng.randrange(1, 80)):
                    if keys and rng.random() < 0.45:
                        key, table = keys.pop(rng.randrange(len(keys)))
                        txn.delete(key, db=table)
                    else:
                        key, table = rng.randbytes(rng.randrange(1, 60)), rng.choice(tables)
                        txn.put(key, bytes(rng.choice(LENGTHS)), db=table)
                        keys.append((key, table))
                if rng.random() < 0.1:
                    txn.abort()
                    break
    return folder / "data.mdb"


def write_values(folder: Path) -> Path:
    """Writes 1000 records in one table, some of them in pages of their own; the last two commits free pages."""
    with lmdb.open(str(folder), map_size=1 << 27, sync=False, max_dbs=1) as env:
        table = env.open_db(b"values")
        for first in (0, 500):
            with env.begin(write=True, db=table) as txn:
                for number in range(first, first + 500):
                    txn.put(b"%08d" % number, bytes(5000 if number % 50 == 0 else 200))
        with env.begin(write=True, db=table) as txn:
            txn.delete(b"%08d" % 50)
    return folder / "data.mdb"


def find(path: Path) -> str:
    with open(path, "rb", buffering=0) as file:
        newest = max(read_metas(file, PAGESIZE), key=lambda meta: meta.transaction)
    return find_broken_page(path, newest, PAGESIZE)


def find_page(content: bytes, kind: int) -> int:
    """Returns the last page of a kind that is in use: the last leaf has the highest records, all others are older."""
    pages = range(2, len(content) // PAGESIZE)
    kinds = {page: struct.unpack_from("<H", content, page * PAGESIZE + FLAGS_AT)[0] for page in pages}
    return [page for page in pages if kinds[page] == kind][-1]


def change(path: Path, offset: int, new: bytes) -> None:
    content = bytearray(path.read_bytes())
    content[offset : offset + len(new)] = new
    path.write_bytes(content)


@pytest.mark.parametrize("seed", range(30))
def test_pages_when_records_were_written_at_random_then_none_is_broken(tmp_path: Path, seed: int) -> None:
    assert find(write_randomly(tmp_path, seed=seed)) == ""


@pytest.mark.parametrize("seed", range(8))
def test_pages_when_one_that_the_newest_tree_uses_is_cut_off_then_it_is_named(tmp_path: Path, seed: int) -> None:
    path = write_randomly(tmp_path, seed=seed)
    last = len(path.read_bytes()) // PAGESIZE
    while not (reason := find(path)):
        last -= 1
        os.truncate(path, last * PAGESIZE)
    assert f"page {last} " in reason or "was cut off" in reason
    assert last > 2


@pytest.mark.parametrize(
    ("kind", "at", "new", "reason"),
    [
        (LEAF, 0, b"\xff\xff", "has the number of another"),
        (LEAF, FLAGS_AT, b"\x05", "of another kind"),
        (LEAF, FLAGS_AT + 1, b"\x80", "of another kind"),
        (LEAF, LIMITS_AT, b"\x11", "no sound limits"),
        (LEAF, LIMITS_AT, b"\x10\x00", "no sound limits"),
        (LEAF, LIMITS_AT + 2, b"\xff\xff", "no sound limits"),
        (LEAF, FIRST_RECORD_AT, b"\x00\x00", "a record elsewhere"),
        (BRANCH, FLAGS_AT, b"\x02", "of another kind"),
        (BRANCH, LIMITS_AT, b"\x12\x00", "no sound limits"),
        (OVERFLOW, FLAGS_AT, b"\x02", "of another kind"),
        (OVERFLOW, LIMITS_AT, b"\x01\x00", "too short for its value"),
        (OVERFLOW, LIMITS_AT, b"\xff\xff", "does not exist"),
    ],
)
def test_pages_when_a_header_is_damaged_then_the_page_is_named(
    tmp_path: Path, kind: int, at: int, new: bytes, reason: str
) -> None:
    path = write_values(tmp_path)
    page = find_page(path.read_bytes(), kind)
    change(path, page * PAGESIZE + at, new)
    found = find(path)
    assert reason in found
    assert f"page {page} of the table " in found or at == 0


@pytest.mark.parametrize("length", [0, 4096, 8192])
def test_pages_when_the_file_has_hardly_any_then_said(tmp_path: Path, length: int) -> None:
    path = write_values(tmp_path)
    os.truncate(path, length)
    assert find(path) != ""


def test_pages_when_a_record_has_another_length_then_the_page_is_named(tmp_path: Path) -> None:
    path = write_values(tmp_path)
    content = path.read_bytes()
    page = find_page(content, LEAF)
    (first,) = struct.unpack_from("<H", content, page * PAGESIZE + FIRST_RECORD_AT)
    (nbytes,) = struct.unpack_from("<H", content, page * PAGESIZE + first)
    change(path, page * PAGESIZE + first, struct.pack("<H", nbytes - 4))
    assert "not side by side" in find(path)
    change(path, page * PAGESIZE + first, struct.pack("<H", 60_000))
    assert "too long" in find(path)


def test_pages_when_a_branch_leads_to_the_same_page_twice_then_said(tmp_path: Path) -> None:
    path = write_values(tmp_path)
    content = path.read_bytes()
    at = find_page(content, BRANCH) * PAGESIZE
    first, second = struct.unpack_from("<HH", content, at + FIRST_RECORD_AT)
    change(path, at + second, content[at + first : at + first + 6])
    assert "is used twice" in find(path) or "its record says" in find(path)


@pytest.fixture
def checks() -> Iterator[None]:
    """Has this process check the pages of environments, until the test ends."""
    with environments.hold_page_checks():
        yield


@pytest.mark.usefixtures("checks")
@pytest.mark.parametrize("writable", [True, False])
def test_environment_when_a_page_is_broken_then_a_process_that_looks_refuses_it(tmp_path: Path, writable: bool) -> None:
    path = write_values(tmp_path)
    page = find_page(path.read_bytes(), LEAF)
    whole = path.read_bytes()[page * PAGESIZE + LIMITS_AT :][:1]
    change(path, page * PAGESIZE + LIMITS_AT, b"\x11")
    with pytest.raises(CorruptDataError, match=f"page {page} of .*; stop the server, and see `tdserve check`"):
        environments.acquire(tmp_path, writable=writable, max_bytes=1 << 27)
    change(path, page * PAGESIZE + LIMITS_AT, whole)
    environments.release(environments.acquire(tmp_path, writable=writable, max_bytes=1 << 27))
