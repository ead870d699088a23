"""What local clients leave behind; most of it is tested with the writes themselves, in test_in_place and
test_replays_local."""

from __future__ import annotations

import numpy as np
import pytest

from tdserve.row_numbers import encode_rows
from tdserve.server.entry import Entry
from tdserve.server.recovery.lost import Overwrite
from tdserve.server.recovery.reserved import ReservedRows
from tdserve.store.session_locks import SessionLock
from tests.unit.server.replaying import create
from tests.unit.server.world import Loop, World

LOCK = "lock"
ROWS = np.array([1, 2], np.int64)


@pytest.fixture
def entry(world: World, run: Loop) -> Entry:
    """An empty ring of eight rows."""
    return create(world, run)


def records(world: World) -> int:
    """How many rows are on record, of all stores."""
    return len(world.db.scan("pending", b"reserved:")) + len(world.db.scan("pending", b"overwrites:"))


def test_forget_when_the_store_is_deleted_then_nothing_stays_on_record(world: World, run: Loop, entry: Entry) -> None:
    uid = entry.record.uid
    ReservedRows(uid, LOCK, 1, encode_rows(ROWS)).save(world.db)
    Overwrite(uid, LOCK, 2, ROWS, ()).save(world.db)
    ReservedRows("another", LOCK, 1, encode_rows(ROWS)).save(world.db)
    assert records(world) == 3
    run(world.stores.delete(entry))
    assert records(world) == 1


def test_reserved_when_the_writer_is_gone_then_off_the_record(world: World, entry: Entry) -> None:
    uid = entry.record.uid
    ReservedRows(uid, LOCK, 1, encode_rows(ROWS)).save(world.db)
    lock = SessionLock.hold(world.root.sessions_folder, LOCK)
    assert lock is not None
    assert [each.rows.tolist() for each in world.stores.unfinished.reserved(uid)] == [ROWS.tolist()]
    lock.release()
    assert world.stores.unfinished.reserved(uid) == []
    assert records(world) == 0


def test_overwritten_when_on_record_then_each_row_once(world: World, entry: Entry) -> None:
    for request, rows in ((1, [3, 1]), (2, [1, 5])):
        Overwrite(entry.record.uid, LOCK, request, np.array(rows), ()).save(world.db)
    assert world.stores.unfinished.overwritten(entry.record.uid, entry.spec).tolist() == [1, 3, 5]
    assert world.stores.unfinished.overwritten("another", entry.spec).tolist() == []
