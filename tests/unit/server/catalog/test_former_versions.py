"""The last versions of deleted stores."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tdserve.base import failpoints
from tdserve.base.errors import CapacityError
from tdserve.server.catalog.former_versions import FormerVersions
from tdserve.store.database.catalog_db import CatalogDB


@pytest.fixture
def db(tmp_path: Path) -> Iterator[CatalogDB]:
    with CatalogDB(tmp_path / "catalog") as opened:
        yield opened


def note(db: CatalogDB, former: FormerVersions, name: str, version: int) -> None:
    with db.begin_transaction() as txn:
        former.note(name, version, txn)


def test_find_when_a_version_was_noted_then_of_this_name_alone_also_after_a_restart(db: CatalogDB) -> None:
    former = FormerVersions(db)
    note(db, former, "w", 5)
    note(db, former, "w", 3)
    for known in (former, FormerVersions(db)):
        assert (known.find("w"), known.find("other")) == (5, 0)


def test_find_when_the_transaction_fails_then_as_before(db: CatalogDB) -> None:
    former = FormerVersions(db)
    failpoints.arm("catalog.written=ENOSPC")
    try:
        with pytest.raises(CapacityError):
            note(db, former, "w", 5)
    finally:
        failpoints.arm("")
    assert former.find("w") == FormerVersions(db).find("w") == 0


def test_find_when_there_were_too_many_names_then_none_is_below_its_last(db: CatalogDB) -> None:
    former, last = FormerVersions(db, 3), {}
    for number in range(40):
        name = f"batch-{number * 7 % 11}"
        last[name] = former.find(name) + 1 + number % 3
        note(db, former, name, last[name])
        for known in (former, FormerVersions(db, 3)):
            assert all(known.find(each) >= version for each, version in last.items())
        assert db.count_records("states") <= 4
    assert former.find("never used") <= max(last.values())
