"""Stores whose folders have later records than the catalog."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tdserve.base.errors import CorruptDataError
from tdserve.rules.catalog import StoreRecord
from tdserve.rules.weights import Versions
from tdserve.server.catalog.kept_records import keep_records
from tdserve.server.catalog.later_records import check_folder, find_later, find_other_structure
from tdserve.server.catalog.moments import note_pass, read_moments
from tdserve.server.recovery.restructured import Restructured
from tdserve.store.database.catalog_db import CatalogDB
from tdserve.store.durability.sync_pass import Pass, SyncedWeights
from tdserve.store.roots.record_file import KeptRecord
from tdserve.store.rows.generations import FILE_NAME as GENERATION_FILE, Generations

RECORD = StoreRecord("policy", "weights", uid="a" * 32)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "stores/policy"
    (folder / "versions").mkdir(parents=True)
    return folder


@pytest.fixture
def db(tmp_path: Path) -> Iterator[CatalogDB]:
    """A catalog with weights that have no version yet."""
    with CatalogDB(tmp_path / "catalog") as db:
        db.put("stores", b"policy", RECORD.to_bytes())
        yield db


def keep(db: CatalogDB, folder: Path, *, is_noted: bool = True) -> KeptRecord:
    """Makes a pass that keeps the record; returns what the folder has."""
    if is_noted:
        note_pass(db, begins_run=True)
    weights = SyncedWeights(RECORD.uid, str(folder / "versions"), {})
    keep_records(Pass(str(folder.parent.parent / "catalog"), "", weights=[weights], is_all=True))
    found = KeptRecord.load(folder)
    assert found is not None
    return found


def count(db: CatalogDB, version: int) -> None:
    """Puts a state into the catalog."""
    state = {**Versions().get_state(), "last_begun": version}
    db.put("states", RECORD.uid.encode(), json.dumps(state).encode())


def go_back(db: CatalogDB, states: dict[bytes, bytes]) -> None:
    """Makes the states of the catalog those of an earlier moment."""
    for key in db.list_keys("states"):
        db.delete("states", key)
    for key, content in states.items():
        db.put("states", key, content)


def test_record_when_the_catalog_went_on_then_it_is_not_later(db: CatalogDB, folder: Path) -> None:
    before = keep(db, folder)
    assert before.moment == read_moments(db).last
    assert keep(db, folder) == before  # nothing has changed: it is not written again
    count(db, 1)
    check_folder(folder, RECORD, db)
    assert find_later(folder, RECORD, db) is None
    assert keep(db, folder).moment > before.moment


def test_record_when_the_catalog_is_of_an_earlier_moment_then_refused_named_and_kept(
    db: CatalogDB, folder: Path
) -> None:
    keep(db, folder)
    states = dict(db.scan("states"))
    count(db, 1)
    kept = keep(db, folder)
    go_back(db, states)
    for _ in range(2):  # also once the older catalog has gone on
        with pytest.raises(CorruptDataError, match=r"policy/record.json.*later moment.*check --repair"):
            check_folder(folder, RECORD, db)
        later = find_later(folder, RECORD, db)
        assert later is not None
        assert (later.record, later.what) == (RECORD, "counts or settings")
        assert keep(db, folder) == kept


def test_record_when_of_a_later_moment_but_equal_then_the_catalog_goes_on_from_it(
    db: CatalogDB, folder: Path, tmp_path: Path
) -> None:
    kept = keep(db, folder)
    replace(kept, moment=kept.moment + 5).save(folder)
    shutil.copytree(folder, tmp_path / "stores/other/policy")
    assert find_later(folder, RECORD, db) is None
    check_folder(folder, RECORD, db)
    assert KeptRecord.load(folder) == kept
    count(db, 1)
    assert find_later(folder, RECORD, db) is None
    assert find_later(tmp_path / "stores/other/policy", RECORD, db) is not None


def test_record_when_of_an_earlier_tdserve_or_damaged_then_not_refused(db: CatalogDB, folder: Path) -> None:
    replace(keep(db, folder), moment=0).save(folder)
    count(db, 1)
    check_folder(folder, RECORD, db)
    assert find_later(folder, RECORD, db) is None
    (folder / "record.json").write_bytes(b"{}")
    check_folder(folder, RECORD, db)
    assert keep(db, folder).moment > 0


@pytest.mark.parametrize("there", [0, 2, -1])
def test_folder_when_its_files_have_another_structure_then_refused_unless_they_are_changing(
    db: CatalogDB, tmp_path: Path, there: int
) -> None:
    record = StoreRecord("values", "tensordict", uid="b" * 32, structure=1)
    generations = Generations.create(tmp_path / GENERATION_FILE, uid=record.uid, num_rows=1)
    generations.move_structure(1)
    check_folder(tmp_path, record, db)
    assert find_other_structure(tmp_path, record, db) is None
    generations.move_structure(there)
    with pytest.raises(CorruptDataError, match=f"expected structure 1.*found structure {there}.*checkpoint"):
        check_folder(tmp_path, record, db)
    assert find_other_structure(tmp_path, record, db) == there
    db.put("pending", Restructured.make_key(record.uid), b"{}")
    check_folder(tmp_path, record, db)
    assert find_other_structure(tmp_path, record, db) is None
    (tmp_path / GENERATION_FILE).unlink()
    check_folder(tmp_path, record, db)
