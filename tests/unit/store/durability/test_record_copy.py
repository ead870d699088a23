from __future__ import annotations

from pathlib import Path

import lmdb
import numpy as np
import pytest

from tdserve.base.errors import CorruptDataError
from tdserve.store.database.environments import DATA_FILE
from tdserve.store.durability.environment_scan import EnvironmentScanner
from tdserve.store.durability.record_copy import copy_records
from tdserve.store.values.object_folders import get_folder
from tdserve.store.values.objects import ObjectColumn, Objects
from tdserve.store.values.value_copy import ValueCopy


def read_records(folder: Path) -> dict[bytes, dict[bytes, bytes]]:
    with (
        lmdb.open(str(folder / DATA_FILE), subdir=False, lock=False, readonly=True, max_dbs=4) as env,
        env.begin() as txn,
    ):
        names = [bytes(name) for name in txn.cursor().iternext(values=False)]
        return {name: dict(txn.cursor(db=env.open_db(name, txn=txn, create=False))) for name in names}


def put_row(folder: Path, row: int) -> int:
    """Stores a value of one row; returns the number of the commit."""
    with Objects(folder, writable=True, max_bytes=1 << 24) as objects:
        objects.put_many([ObjectColumn(("text",), np.array([row]), [b"%d" % row])])
        return objects.last_commit


def test_records_when_copied_then_all_are_there_in_new_pages_and_no_other_file(tmp_path: Path) -> None:
    with lmdb.open(str(tmp_path), map_size=1 << 27, max_dbs=4) as env:
        tables = [env.open_db(name) for name in (b"a", b"b", b"empty")]
        with env.begin(write=True) as txn:
            for number in range(25_000):
                txn.put(b"%08d" % number, bytes(number % 50), db=tables[number % 2])
            txn.put(b"large", bytes(1 << 20), db=tables[0])
    before, names = read_records(tmp_path), {path.name for path in tmp_path.iterdir()}
    copy_records(tmp_path)
    assert read_records(tmp_path) == before
    assert {path.name for path in tmp_path.iterdir()} == names
    with EnvironmentScanner() as scanner:
        assert scanner.scan(tmp_path / DATA_FILE).broken_page == ""


def test_records_when_they_cannot_be_read_then_nothing_is_changed(tmp_path: Path) -> None:
    put_row(tmp_path, 0)
    path = tmp_path / DATA_FILE
    damaged = path.read_bytes()[:8192] + bytes(path.stat().st_size - 8192)
    path.write_bytes(damaged)
    with pytest.raises(CorruptDataError):
        copy_records(tmp_path)
    assert path.read_bytes() == damaged
    assert {each.name for each in tmp_path.iterdir()} == {DATA_FILE, "lock.mdb"}


def test_synced_copy_when_the_values_are_in_new_pages_then_a_commit_of_the_same_number_is_copied(
    tmp_path: Path,
) -> None:
    live, copy = get_folder(tmp_path, 0), ValueCopy(tmp_path)
    last = [put_row(live, row) for row in range(20)][-1]
    copy.refresh(0)
    copy_records(live)
    row = 20
    while put_row(live, row) < last:
        row += 1
    copy.refresh(0)
    assert read_records(copy.folder) == read_records(live)
