from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tdserve.base.ids import make_uid
from tdserve.rules.catalog import StoreRecord
from tdserve.server.recovery.claim_records import ClaimRecord, find_unfilled_claims
from tdserve.store.database.catalog_db import CatalogDB
from tdserve.store.rows.claim_file import FOLDER, ClaimedRows, ClaimFile

CAPACITY = 10
CLIENT = bytes(range(16))


@pytest.fixture
def db(tmp_path: Path) -> Iterator[CatalogDB]:
    found = CatalogDB(tmp_path / "catalog")
    yield found
    found.close()


@pytest.fixture
def file(tmp_path: Path) -> ClaimFile:
    """A claim file: its client has claimed two, three and one rows from row 8 on, and filled the first five."""
    made = ClaimFile.create(tmp_path / FOLDER / "lock.5", 8)
    for request, num_rows in ((1, 2), (2, 3)):
        made.claim(num_rows)
        made.write(ClaimedRows(CLIENT, request, num_rows))
    made.claim(1)
    return made


def record(**fields: int) -> ClaimRecord:
    """Returns the record of a claim of eight rows from row 8 on."""
    return ClaimRecord("u" * 32, "lock", CLIENT, num=5, first_row=8, num_allowed=8, **fields)


def unfilled(found: ClaimRecord, file: ClaimFile | None) -> list[list[int]]:
    """Returns the unfilled rows of each claim."""
    return [rows.tolist() for rows in found.find_unfilled(file, CAPACITY)]


def test_load_when_saved_then_the_same_and_found_by_its_store(db: CatalogDB) -> None:
    saved = record(num_filled=3, num_taken=2)
    saved.save(db)
    assert ClaimRecord.load(db, saved.uid) == [saved]
    assert ClaimRecord.list_uids(db) == {saved.uid}
    assert ClaimRecord.list_keys(db, saved.uid) == [saved.key]
    assert ClaimRecord.load(db, make_uid()) == []


def test_find_unfilled_when_the_file_records_what_was_filled_then_a_part_for_each_claim(file: ClaimFile) -> None:
    assert unfilled(record(), file) == [[8, 9], [0, 1, 2], [3]]
    assert unfilled(record(num_filled=2, num_taken=1), file) == [[0, 1, 2], [3]]
    assert unfilled(record(num_filled=5, num_taken=2), file) == [[3]]


def test_find_unfilled_when_nothing_is_open_then_none(file: ClaimFile) -> None:
    file.write(ClaimedRows(CLIENT, 3, 1))
    assert unfilled(record(num_filled=6, num_taken=3), file) == []


def test_find_unfilled_when_the_file_is_gone_or_contradicts_itself_then_all_that_was_allowed(file: ClaimFile) -> None:
    assert unfilled(record(), None) == [[8, 9, 0, 1, 2, 3, 4, 5]]
    file.write(ClaimedRows(CLIENT, 4, 100))
    assert unfilled(record(num_filled=2, num_taken=1), file) == [[0, 1, 2, 3, 4, 5]]
    file.write(ClaimedRows(CLIENT, 5, -100))
    assert unfilled(record(num_filled=2, num_taken=1), file) == [[0, 1, 2, 3, 4, 5]]


def test_unfilled_claims_when_read_after_a_restart_then_their_rows_are_odd_and_nothing_more_is_claimed(
    tmp_path: Path, db: CatalogDB, file: ClaimFile
) -> None:
    record(num_filled=2, num_taken=1).save(db)
    left = ClaimFile.create(tmp_path / FOLDER / "lock.4", 8)
    generations = np.full(CAPACITY, 2, np.int64)
    generations[0] = 3  # the client was quicker
    store = StoreRecord("r", "replay", uid="u" * 32, capacity=CAPACITY)
    ((found, several),) = find_unfilled_claims(db, tmp_path, store, generations)
    assert [rows.tolist() for rows in several] == [[0, 1, 2], [3]]
    assert (found.lock_name, found.file_name) == ("lock", "lock.5")
    assert generations.tolist() == [3, 3, 3, 3, 2, 2, 2, 2, 2, 2]
    assert file.claim(1) is None
    assert not left.path.exists(), "nobody's"
