from __future__ import annotations

from mmap import PAGESIZE
from pathlib import Path
from typing import Any

import lmdb
import pytest

import tdserve
from tdserve.store.database import environments
from tdserve.store.database.changed_byte import find_changed_byte
from tdserve.store.database.environments import find_damage
from tdserve.store.database.page_walk import META_BYTES
from tdserve.store.roots.file_sums import compute_file_checksum

TRANSACTION_AT = META_BYTES - 8
"""Place of the number of the last transaction in a page that leads to the records."""


def write_records(folder: Path, *, num_commits: int) -> Path:
    with lmdb.open(str(folder)) as env:
        for number in range(num_commits):
            with env.begin(write=True) as txn:
                txn.put(f"key {number}".encode(), bytes(1000))
    return folder / "data.mdb"


def read_records(txn: lmdb.Transaction, *, num_records: int) -> list[Any]:
    return [txn.get(f"key {number}".encode()) for number in range(num_records)]


def change_byte(path: Path, offset: int, *, by: int) -> None:
    content = bytearray(path.read_bytes())
    content[offset] ^= by
    path.write_bytes(content)


@pytest.mark.parametrize("by", [1, 2, 64, 255])
@pytest.mark.parametrize("page", [0, 1])
@pytest.mark.parametrize("at", [16, 24, 112, TRANSACTION_AT, TRANSACTION_AT + 7])
def test_byte_when_one_that_leads_to_records_has_changed_then_found_and_put_back(
    tmp_path: Path, page: int, at: int, by: int
) -> None:
    path = write_records(tmp_path, num_commits=40)
    checksum, content = compute_file_checksum(path), path.read_bytes()
    change_byte(path, page * PAGESIZE + at, by=by)
    found = find_changed_byte(path, checksum)
    assert found is not None
    assert found.offset == page * PAGESIZE + at
    found.put_back(path)
    assert path.read_bytes() == content


def test_byte_when_others_have_changed_then_none_is_found(tmp_path: Path) -> None:
    path = write_records(tmp_path, num_commits=40)
    checksum = compute_file_checksum(path)
    change_byte(path, 5 * PAGESIZE, by=1)
    assert find_changed_byte(path, checksum) is None
    change_byte(path, 5 * PAGESIZE, by=1)
    for page in (0, 1):
        change_byte(path, page * PAGESIZE + TRANSACTION_AT, by=1)
    assert find_changed_byte(path, checksum) is None


@pytest.mark.parametrize("num_commits", [0, 1, 2, 7])
def test_damage_when_the_last_transactions_follow_each_other_then_none(tmp_path: Path, num_commits: int) -> None:
    path = write_records(tmp_path, num_commits=num_commits)
    assert find_damage(path) == ""
    with lmdb.open(str(tmp_path)) as env:
        (tmp_path / "copy").mkdir()
        env.copy(str(tmp_path / "copy"), compact=True)
    assert find_damage(tmp_path / "copy" / "data.mdb") == ""


def test_damage_when_they_do_not_follow_each_other_then_it_is_named(tmp_path: Path) -> None:
    path = write_records(tmp_path, num_commits=7)
    change_byte(path, PAGESIZE + TRANSACTION_AT + 1, by=1)
    assert "as the last two" in find_damage(path)
    with pytest.raises(tdserve.CorruptDataError, match="as the last two"):
        environments.acquire(tmp_path, writable=True, max_bytes=1 << 20)


def test_environment_when_its_file_was_cut_then_damaged_records_and_no_process_ends(tmp_path: Path) -> None:
    path = write_records(tmp_path, num_commits=40)
    nbytes = path.stat().st_size
    path.write_bytes(path.read_bytes()[: nbytes // 2])
    environments.release(environments.acquire(tmp_path, writable=False, max_bytes=0))
    assert path.stat().st_size == nbytes // 2  # a process that only reads leaves it as it is
    opened = environments.acquire(tmp_path, writable=True, max_bytes=1 << 20)
    assert path.stat().st_size >= nbytes
    with opened.env.begin() as txn, pytest.raises(lmdb.Error):
        read_records(txn, num_records=40)
    environments.release(opened)
