from __future__ import annotations

import pytest

from tdserve.base.errors import StoreNotFoundError
from tdserve.messages.row_numbers import decode_rows
from tdserve.rules.replay.plans import PLAIN_ARRIVAL
from tdserve.rules.replay.samplers.order import Fifo
from tdserve.server.tables.commits import commit_rows
from tdserve.store.rows.claim_file import ClaimedRows
from tdserve.v1 import control_pb2
from tests.unit.server.replaying import create
from tests.unit.server.world import Loop, World

CLIENT = bytes(16)


def test_commit_rows_when_committed_then_live_on_record_and_the_answer_of_a_retry(world: World, run: Loop) -> None:
    store = create(world, run, sampler=Fifo())
    table = store.get_table()
    reservation = table.arrivals.reserve(3)
    assert reservation is not None

    async def commit() -> control_pb2.Done:
        return commit_rows(
            world.stores,
            world.answers,
            store,
            reservation,
            PLAIN_ARRIVAL,
            [ClaimedRows(CLIENT, 7, 1)],
            also=lambda txn: txn.put("pending", b"beside", b"it"),
        )

    done = run(commit())
    assert decode_rows(done.indices).tolist() == [2], "of the last of several extends"
    assert world.answers.find_answer(CLIENT, 7) == done.SerializeToString()
    assert world.db.get("pending", b"beside") == b"it"
    assert table.state.list_live_rows().tolist() == [0, 1, 2]
    world.reopen()
    assert world.stores.get("r").get_table().info()["inserts"] == 3


def test_commit_rows_when_the_store_was_deleted_then_nothing_is_on_record(world: World, run: Loop) -> None:
    store = create(world, run)
    reservation = store.get_table().arrivals.reserve(1)
    assert reservation is not None
    run(world.stores.delete(store))
    with pytest.raises(StoreNotFoundError):
        commit_rows(
            world.stores,
            world.answers,
            store,
            reservation,
            PLAIN_ARRIVAL,
            [ClaimedRows(CLIENT, 1, 1)],
            also=lambda txn: None,
        )
    assert world.answers.find_answer(CLIENT, 1) is None
