"""The reserve of the catalog: changes that may be refused do not get it, and it is filled up when the disk has room
again."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tdserve.base.errors import CapacityError
from tdserve.store.database.catalog_db import CatalogDB
from tdserve.store.database.catalog_room import RESERVE_BYTES
from tests.unit.store.conftest import SMALL_DISK_BYTES


def allocated_bytes(catalog: Path) -> int:
    """Returns the bytes that the data file has on its disk."""
    return os.stat(catalog / "data.mdb").st_blocks * 512


def test_catalog_when_it_is_opened_then_has_its_reserve_on_disk(tmp_path: Path) -> None:
    for _ in range(2):
        with CatalogDB(tmp_path) as db:
            assert RESERVE_BYTES < allocated_bytes(tmp_path) < 4 * RESERVE_BYTES
            db.put("stores", b"a", b"1")


def test_put_when_the_disk_was_full_and_has_room_again_then_goes_on(small_disk: Path) -> None:
    filling = small_disk / "filling"
    with CatalogDB(small_disk / "catalog") as db:
        filling.write_bytes(bytes(SMALL_DISK_BYTES - 2 * RESERVE_BYTES - (1 << 17)))
        value = bytes(RESERVE_BYTES)
        with pytest.raises(CapacityError) as caught:
            db.put("states", b"large", value)
        assert caught.value.asked == len(value)
        num_free = int(os.statvfs(small_disk).f_bavail * os.statvfs(small_disk).f_frsize)
        assert caught.value.free == num_free < len(value)
        assert f"its disk is full ({num_free} bytes are free there)" in str(caught.value)
        filling.unlink()
        db.put("states", b"large", value)


def test_put_when_the_catalog_has_reached_its_limit_then_the_error_names_it(tmp_path: Path) -> None:
    with CatalogDB(tmp_path, max_bytes=4 * RESERVE_BYTES) as db:
        with pytest.raises(CapacityError, match=f"has reached its limit of {4 * RESERVE_BYTES} bytes") as caught:
            db.put("states", b"large", bytes(4 * RESERVE_BYTES))
        assert "disk is full" not in str(caught.value)


def test_catalog_when_it_is_opened_on_a_full_disk_then_can_be_read_and_emptied(small_disk: Path) -> None:
    folder = small_disk / "catalog"
    with CatalogDB(folder) as db:
        for number in range(1000):
            db.put("specs", b"%d" % number, bytes(500))
    (small_disk / "filling").write_bytes(bytes(os.statvfs(small_disk).f_bavail * 4096))
    assert os.statvfs(small_disk).f_bavail == 0
    with CatalogDB(folder) as db:
        for number in range(1000):
            assert db.get("specs", b"%d" % number) == bytes(500)
            db.delete("specs", b"%d" % number)
        assert not db.owes
