from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tdserve.server.recovery import writer_records
from tdserve.store.database.catalog_db import CatalogDB


@pytest.fixture
def db(tmp_path: Path) -> Iterator[CatalogDB]:
    opened = CatalogDB(tmp_path / "catalog")
    yield opened
    opened.close()


def _save(db: CatalogDB, kind: str, uid: str, lock_name: str, num: int) -> bytes:
    key = writer_records.make_key(kind, uid=uid, lock_name=lock_name, num=num)
    db.put("pending", key, f"{uid}-{num}".encode())
    return key


def test_load_when_saved_then_lock_name_number_and_content_come_back(db: CatalogDB) -> None:
    _save(db, "kind", "a", "lock", 7)
    assert list(writer_records.load(db, "kind", "a")) == [("lock", 7, b"a-7")]


def test_load_when_other_stores_and_kinds_are_on_record_then_they_are_left_out(db: CatalogDB) -> None:
    mine = _save(db, "kind", "a", "lock", 7)
    _save(db, "kind", "ab", "lock", 8)
    _save(db, "other", "a", "lock", 9)
    assert list(writer_records.load(db, "kind", "a")) == [("lock", 7, b"a-7")]
    assert writer_records.list_keys(db, "kind", "a") == [mine]
