"""The catalog on disk: atomic, ordered, and there after kill -9."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tdserve.base.errors import CapacityError, ClosedError, CorruptDataError, LocalProtocolError
from tdserve.store.database.catalog_db import CatalogDB
from tests.unit.store.conftest import SMALL_DISK_BYTES
from tests.unit.store.short_files import no_page_can_be_written

COMMIT_THEN_WAIT = """
import signal, sys
from tdserve.store.database.catalog_db import CatalogDB
db = CatalogDB(sys.argv[1])
with db.begin_transaction() as txn:
    txn.put("stores", b"a", b"1")
    txn.put("specs", b"a", b"2")
with db.begin_transaction() as txn:
    txn.put("stores", b"unfinished", b"3")
    print("committed", flush=True)
    signal.pause()
"""


@pytest.fixture
def db(tmp_path: Path) -> Iterator[CatalogDB]:
    with CatalogDB(tmp_path / "catalog") as opened:
        yield opened


def test_records_when_put_then_are_read_in_their_own_table(db: CatalogDB) -> None:
    db.put("stores", b"a", b"1")
    db.put("stores", b"a", b"2")
    assert db.get("stores", b"a") == b"2"
    assert db.get("specs", b"a") is None
    for _ in range(2):
        db.delete("stores", b"a")
        assert db.get("stores", b"a") is None


def test_scan_when_given_a_prefix_then_is_ordered_and_bounded(db: CatalogDB) -> None:
    for key in (b"b/2", b"a/1", b"b/1", b"c"):
        db.put("stores", key, key.upper())
    assert db.scan("stores", b"b/") == [(b"b/1", b"B/1"), (b"b/2", b"B/2")]
    assert [key for key, _ in db.scan("stores")] == [b"a/1", b"b/1", b"b/2", b"c"]
    assert db.scan("stores", b"zzz") == []
    assert db.scan("pending") == []


def test_transaction_when_its_block_raises_then_nothing_is_stored(db: CatalogDB) -> None:
    with pytest.raises(LocalProtocolError), db.begin_transaction() as txn:  # noqa: PT012
        txn.put("stores", b"a", b"1")
        assert txn.get("stores", b"a") == b"1"
        txn.put("stores", b"", b"an empty key is refused")
    assert db.get("stores", b"a") is None


def test_catalog_when_its_writer_is_killed_then_has_the_committed_and_not_the_rest(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", COMMIT_THEN_WAIT, str(tmp_path / "db")], stdout=subprocess.PIPE
    ) as writer:
        assert writer.stdout is not None
        writer.stdout.readline()
        writer.send_signal(signal.SIGKILL)
    with CatalogDB(tmp_path / "db") as db:
        assert db.scan("stores") == [(b"a", b"1")]
        assert db.get("specs", b"a") == b"2"
        db.put("stores", b"next", b"")


def test_catalog_when_reopened_after_sync_then_has_everything(tmp_path: Path) -> None:
    with CatalogDB(tmp_path) as db:
        db.put("states", b"k", b"v" * 100_000)
        db.sync()
    with CatalogDB(tmp_path) as db:
        assert db.get("states", b"k") == b"v" * 100_000


def test_catalog_when_its_map_is_full_then_capacity_error_and_goes_on(tmp_path: Path) -> None:
    with CatalogDB(tmp_path, max_bytes=1 << 20) as db:
        with pytest.raises(CapacityError) as caught:
            db.put("stores", b"big", bytes(2 << 20))
        assert caught.value.asked == 2 << 20
        db.put("stores", b"small", b"1")
        assert db.scan("stores") == [(b"small", b"1")]


def test_catalog_when_the_disk_is_full_then_capacity_error_and_goes_on(small_disk: Path) -> None:
    with CatalogDB(small_disk / "catalog") as db:
        db.put("stores", b"first", b"1")
        with pytest.raises(CapacityError) as caught:
            db.put("stores", b"big", bytes(2 * SMALL_DISK_BYTES))
        assert caught.value.free <= SMALL_DISK_BYTES
        db.put("stores", b"second", b"2")
        assert db.scan("stores") == [(b"first", b"1"), (b"second", b"2")]


@pytest.mark.parametrize("key", [b"", bytes(512)])
def test_put_when_key_has_no_fitting_length_then_is_our_bug(db: CatalogDB, key: bytes) -> None:
    with pytest.raises(LocalProtocolError):
        db.put("stores", key, b"")


def test_catalog_when_its_file_is_garbage_then_is_corrupt(tmp_path: Path) -> None:
    (tmp_path / "data.mdb").write_bytes(b"garbage!" * 4096)
    with pytest.raises(CorruptDataError, match=str(tmp_path)):
        CatalogDB(tmp_path)


def test_catalog_when_closed_then_refuses(tmp_path: Path) -> None:
    db = CatalogDB(tmp_path)
    db.close()
    db.close()
    with pytest.raises(ClosedError):
        db.get("stores", b"a")


def test_scan_when_there_are_10000_records_then_takes_less_than_50_ms(db: CatalogDB) -> None:
    with db.begin_transaction() as txn:
        for number in range(10_000):
            txn.put("stores", b"%05d" % number, bytes(300))
    took_s = []
    for _ in range(5):
        start = time.thread_time()
        assert len(db.scan("stores")) == 10_000
        took_s.append(time.thread_time() - start)
    assert min(took_s) < 0.05


def test_keys_when_asked_then_all_of_the_table_and_as_many_as_are_counted(db: CatalogDB) -> None:
    for key in (b"b", b"a"):
        db.put("stores", key, b"1")
    db.put("specs", b"c", b"2")
    assert db.list_keys("stores") == [b"a", b"b"]
    assert [db.count_records(table) for table in ("stores", "specs", "states")] == [2, 1, 0]


def fill(db: CatalogDB) -> int:
    """Puts records until there is no room; returns how many there are."""
    for number in range(100_000):
        try:
            db.put("specs", b"%06d" % number, bytes(700))
        except CapacityError:
            return number
    raise AssertionError("it does not get full")


def check_decided(db: CatalogDB) -> None:
    """Checks that a full catalog takes decided changes, and as much new content as was removed."""
    num_records = fill(db)
    num_answers = 200
    for number in range(num_answers):
        with db.begin_transaction(is_decided=True) as txn:
            txn.put("requests", b"%d" % number, bytes(1000))
            txn.delete("pending", b"never there")
        assert not db.owes
    for number in range(num_records):
        db.delete("specs", b"%06d" % number)
        assert not db.owes
    assert fill(db) > num_records // 2
    assert len(db.scan("requests")) == num_answers


def test_decided_changes_when_the_map_is_full_then_they_find_room(tmp_path: Path) -> None:
    with CatalogDB(tmp_path, max_bytes=2 << 20) as db:
        check_decided(db)


@pytest.mark.slow
def test_decided_changes_when_the_disk_is_full_then_they_find_room(small_disk: Path) -> None:
    with CatalogDB(small_disk / "catalog") as db:
        db.put("stores", b"a", b"1")
        (small_disk / "other").write_bytes(bytes(SMALL_DISK_BYTES - 3 * (1 << 20)))
        check_decided(db)


def test_decided_changes_when_nothing_can_be_written_then_are_seen_and_go_with_the_next(tmp_path: Path) -> None:
    with CatalogDB(tmp_path) as db:
        owed: list[bool] = []
        db.on_owed = lambda: owed.append(db.owes)
        db.put("pending", b"journal", b"1")
        db.put("pending", b"other", b"2")
        with no_page_can_be_written():
            db.delete("pending", b"journal")
            with db.begin_transaction(is_decided=True) as txn:
                txn.put("requests", b"answer", b"3")
                assert txn.get("pending", b"journal") is None
            with pytest.raises(CapacityError):
                db.put("stores", b"newer", b"4")
            assert not db.settle()
        assert owed == [True, True, True]
        assert db.get("pending", b"journal") is None
        assert db.scan("pending") == [(b"other", b"2")]
        assert db.scan("requests", b"a") == [(b"answer", b"3")]
        assert db.list_keys("pending") == [b"other"]
        db.put("stores", b"newer", b"4")  # never on the disk without earlier decisions
        assert not db.owes
    with CatalogDB(tmp_path) as db:
        assert db.scan("pending") == [(b"other", b"2")]
        assert db.get("requests", b"answer") == b"3"
        assert db.get("stores", b"newer") == b"4"


def test_pinned_records_when_others_are_written_and_owed_then_as_they_were(db: CatalogDB) -> None:
    db.put("packed", b"a", b"1")
    with no_page_can_be_written(), db.begin_transaction(is_decided=True) as txn:
        txn.put("packed", b"b", b"owed")
    pinned = db.pin()
    db.put("packed", b"a", b"2")
    db.put("packed", b"b", b"3")
    db.put("packed", b"c", b"4")
    assert pinned.get_many("packed", [b"a", b"b", b"c"]) == {b"a": b"1", b"b": b"owed"}
    pinned.close()
    assert db.get("packed", b"a") == b"2"


def test_owed_changes_when_the_catalog_is_closed_then_they_are_written(tmp_path: Path) -> None:
    db = CatalogDB(tmp_path)
    db.put("pending", b"journal", b"1")
    with no_page_can_be_written():
        db.delete("pending", b"journal")
    db.close()
    with CatalogDB(tmp_path) as db:
        assert db.scan("pending") == []
