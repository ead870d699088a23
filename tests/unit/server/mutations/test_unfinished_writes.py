"""Writes that local clients leave unfinished. Most tests are beside the writes, in test_in_place and
test_replays_local."""

from __future__ import annotations

import asyncio
import math
import time

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from tdserve.base.deadline import Deadline
from tdserve.base.errors import DeadlineExceededError
from tdserve.messages.row_numbers import encode_rows
from tdserve.messages.row_sets import RowSet
from tdserve.messages.selection.selection import parse
from tdserve.rules.replay.samplers.order import Fifo
from tdserve.server.catalog.seals import Seal
from tdserve.server.moves.sealing import Sealing
from tdserve.server.mutations import unfinished_writes
from tdserve.server.mutations.unfinished_writes import RETRY_GRACE_S
from tdserve.server.open_store.opened_store import OpenedStore
from tdserve.server.recovery.lost_rows import Overwrite
from tdserve.server.recovery.reserved import ReservedRows
from tdserve.store.exchange.session_locks import SessionLock
from tdserve.v1 import control_pb2
from tests.unit.server.local_peer import LocalPeer
from tests.unit.server.replaying import create, extend, rows
from tests.unit.server.world import Loop, World

LOCK = "lock"
TD = TensorDict({"a": torch.zeros(4)}, [4])
ROWS = np.array([1, 2], np.int64)


@pytest.fixture
def store(world: World, run: Loop) -> OpenedStore:
    """An empty ring of eight rows."""
    return create(world, run)


def records(world: World) -> int:
    """How many rows are on record, of all stores."""
    return len(world.db.scan("pending", b"reserved:")) + len(world.db.scan("pending", b"overwrites:"))


def test_forget_when_the_store_is_deleted_then_nothing_stays_on_record(
    world: World, run: Loop, store: OpenedStore
) -> None:
    uid = store.record.uid
    ReservedRows(uid, LOCK, 1, encode_rows(ROWS)).save(world.db)
    Overwrite(uid, LOCK, 2, RowSet.from_rows(ROWS), ()).save(world.db)
    ReservedRows("another", LOCK, 1, encode_rows(ROWS)).save(world.db)
    assert records(world) == 3
    run(world.stores.delete(store))
    assert records(world) == 1


def test_reserved_when_the_writer_is_gone_then_off_the_record(world: World, store: OpenedStore) -> None:
    uid = store.record.uid
    ReservedRows(uid, LOCK, 1, encode_rows(ROWS)).save(world.db)
    lock = SessionLock.hold(world.root.sessions_folder, LOCK)
    assert lock is not None
    assert [each.rows.tolist() for each in world.stores.unfinished_writes.find_reserved(uid)] == [ROWS.tolist()]
    lock.release()
    assert world.stores.unfinished_writes.find_reserved(uid) == []
    assert records(world) == 0


def test_overwritten_when_on_record_then_each_row_once(world: World, store: OpenedStore) -> None:
    for request, numbers in ((1, [3, 1]), (2, [1, 5])):
        Overwrite(store.record.uid, LOCK, request, RowSet.from_rows(np.array(numbers)), ()).save(world.db)
    assert world.stores.unfinished_writes.find_overwritten(store.record.uid, store.spec).tolist() == [1, 3, 5]
    assert world.stores.unfinished_writes.find_overwritten("another", store.spec).tolist() == []


def overwriting(store: OpenedStore, index: list[int]) -> control_pb2.WriteRequest:
    """A write of a local client: its tensors come another way."""
    content = control_pb2.Content(fingerprint=store.spec.fingerprint)
    return control_pb2.WriteRequest(
        store=store.name, selection=parse(index).to_message(), content=content, timeout_s=20.0
    )


def begin(world: World, peer: LocalPeer, asked: control_pb2.WriteRequest) -> asyncio.Task[control_pb2.Done]:
    """The write, under way."""
    return asyncio.create_task(world.writes.write(peer.session, 1, asked))


@pytest.mark.parametrize("rounds", [[[1]], [[1], [2]], [[1, 2]]])
def test_delete_when_a_client_overwrites_the_rows_then_they_do_not_come_back_after_a_restart(
    world: World, run: Loop, rounds: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unfinished_writes, "RETRY_GRACE_S", 0.0)
    table = create(world, run, capacity=4, sampler=Fifo())
    extend(world, run, table, rows(10, 4))
    gone = [row for deleted in rounds for row in deleted]

    async def stop() -> LocalPeer:
        peer = LocalPeer(world)
        await peer.__aenter__()
        write = begin(world, peer, overwriting(table, [1, 2]))
        await peer.accepted()
        for request, deleted in enumerate(rounds, 5):
            delete = control_pb2.Rows(data=encode_rows(np.array(deleted)))
            asked = control_pb2.ChangeRequest(store="r", delete=delete)
            assert (await world.changes.change(world.session(2), request, asked)).num_rows == len(deleted)
        await peer.leave_in(write)
        return peer

    stopped = run(stop())
    world.process_watch.close()

    async def scenario() -> None:
        world.reopen()
        again = world.stores.get("r").get_table()
        assert again.state.list_live_rows().tolist() == sorted({0, 1, 2, 3} - set(gone))
        info = again.info()
        assert (info["num_reserved"], info["num_held"]) == (len(gone), 2 - len(gone))
        world.stores.unfinished_writes.on_open()
        over = asyncio.Event()
        world.process_watch.watch(stopped.lock_name, over.set)
        stopped.let_go()
        await over.wait()
        assert again.state.list_live_rows().tolist() == [0, 3]
        assert (again.info()["num_reserved"], again.info()["num_holes"]) == (0, 2)
        await stopped.__aexit__(None, None, None)

    run(scenario())
    assert records(world) == 0


def test_delete_when_a_client_overwrites_the_rows_then_nothing_of_it_is_left_when_that_is_done(
    world: World, run: Loop
) -> None:
    table = create(world, run, capacity=4, sampler=Fifo())
    extend(world, run, table, rows(10, 4))

    async def scenario() -> None:
        async with LocalPeer(world) as peer:
            write = begin(world, peer, overwriting(table, [1, 2]))
            await peer.accepted()
            delete = control_pb2.Rows(data=encode_rows(np.array([1])))
            await world.changes.change(world.session(2), 5, control_pb2.ChangeRequest(store="r", delete=delete))
            peer.done()
            await write

    run(scenario())
    assert table.get_table().state.list_live_rows().tolist() == [0, 2, 3]
    assert records(world) == 0


def test_lost_rows_when_their_writer_is_gone_during_a_seal_then_they_leave_once_it_ends(
    world: World, run: Loop
) -> None:
    table, seal = create(world, run, capacity=4, sampler=Fifo()), Seal(3, f"{7:032x}")
    extend(world, run, table, rows(10, 4))
    sealing, rules = Sealing(world.stores), table.get_table()

    async def scenario() -> None:
        async with LocalPeer(world) as peer:
            write = begin(world, peer, overwriting(table, [1, 2]))
            await peer.accepted()
            await peer.leave_in(write)
            sealing.begin(table, seal)
            await sealing.wait_at_rest(table, seal, Deadline.after(20.0), keeps_unfinished=True)
            before = table.get_generation_values().tolist()
            over = asyncio.Event()
            world.process_watch.watch(peer.lock_name, over.set)
            peer.let_go()
            await over.wait()
            assert (table.get_generation_values().tolist(), rules.info()["num_held"]) == (before, 2)
            sealing.end(table.name, seal)
            await asyncio.sleep(0)
            assert rules.state.list_live_rows().tolist() == [0, 3]
            assert rules.info()["num_held"] == 0

    run(scenario())
    assert records(world) == 0


def test_lost_rows_when_a_seal_waits_for_their_writer_then_at_rest_once_it_is_gone(world: World, run: Loop) -> None:
    table, seal = create(world, run, capacity=4, sampler=Fifo()), Seal(3, f"{7:032x}")
    extend(world, run, table, rows(10, 4))
    sealing = Sealing(world.stores)

    async def scenario() -> None:
        async with LocalPeer(world) as peer:
            write = begin(world, peer, overwriting(table, [1, 2]))
            await peer.accepted()
            await peer.leave_in(write)
            sealing.begin(table, seal)
            with pytest.raises(DeadlineExceededError, match="begun to write"):
                await sealing.wait_at_rest(table, seal, Deadline.after(0.05))
            peer.let_go()
            await sealing.wait_at_rest(table, seal, Deadline.after(20.0))
            assert table.get_table().state.list_live_rows().tolist() == [0, 3]
            sealing.end(table.name, seal)

    run(scenario())


@pytest.mark.parametrize("is_released_first", [False, True])
def test_lost_rows_when_their_writer_is_not_proved_gone_since_a_restart_then_it_is_expected_back(
    world: World, run: Loop, is_released_first: bool
) -> None:
    async def scenario() -> None:
        store = await world.create("x", TD)
        lock = SessionLock.hold(world.root.sessions_folder, LOCK)
        assert lock is not None
        Overwrite(store.record.uid, LOCK, 1, RowSet.from_rows(ROWS), ()).save(world.db)
        store.get_generation_values()[ROWS] |= 1
        world.reopen()
        lost = world.stores.get("x").lost
        assert lost.rewrite_grace_until_s == math.inf
        if is_released_first:
            lock.release()
            while (world.root.sessions_folder / LOCK).exists():  # noqa: ASYNC110 (it is looked at from time to time)
                await asyncio.sleep(0)
            assert lost.rewrite_grace_until_s == math.inf
        world.stores.unfinished_writes.on_open()
        until_s = lost.rewrite_grace_until_s
        assert RETRY_GRACE_S / 2 < until_s - time.monotonic() <= RETRY_GRACE_S
        if not is_released_first:
            lock.release()
            while lost.rewrite_grace_until_s == until_s:  # noqa: ASYNC110 (the same)
                await asyncio.sleep(0)
            assert until_s < lost.rewrite_grace_until_s < math.inf
        world.process_watch.close()

    run(scenario())


def test_overwrite_when_it_is_on_record_as_whole_then_its_rows_are_readable_after_a_restart(
    world: World, run: Loop
) -> None:
    async def scenario() -> None:
        store = await world.create("x", TD)
        overwrite = Overwrite(store.record.uid, LOCK, 1, RowSet.from_rows(ROWS), ())
        overwrite.save(world.db)
        with world.db.begin_transaction() as txn:
            overwrite.commit(txn)
        store.get_generation_values()[[*ROWS, -1]] |= 1
        world.reopen()
        found = world.stores.get("x")
        assert found.get_generation_values().tolist() == [0, 2, 2, 0, 2]
        assert not found.lost
        assert records(world) == 0

    run(scenario())
