"""Requests that are under way when their store is sealed, as for a checkpoint or a move."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from tdserve.base.deadline import Deadline
from tdserve.base.errors import CapacityError, DeadlineExceededError, StoreMovedError, StoreNotFoundError
from tdserve.rules.catalog import StoreRecord
from tdserve.server.catalog.seals import Seal
from tdserve.server.dispatch.requests import Requests
from tdserve.server.moves.move_requests import MoveRequests
from tdserve.server.open_store.opened_store import OpenedStore
from tdserve.server.recovery.restructured import Restructured
from tdserve.store.rows import restructuring
from tdserve.structure.captures.capture import capture
from tdserve.structure.trees import codec
from tdserve.v1 import control_pb2
from tests.unit.server.replaying import create, extend, rows
from tests.unit.server.world import Loop, World, outbox

SEAL = Seal(3, f"{7:032x}")


async def pause(moves: MoveRequests, store: OpenedStore) -> StoreRecord:
    """Brings a store to rest for a moment; returns its record as it is then."""
    leaving = moves.leaving
    sealed = await leaving.seal(store, SEAL, Deadline.after(20.0))
    leaving.unseal(store.name, SEAL)
    return StoreRecord.from_bytes(sealed.store.record)


def adding_z() -> control_pb2.ClientMessage:
    """A request for a leaf that comes to the rows of a table later."""
    asked = control_pb2.ClientMessage(request=7)
    asked.alter.store, asked.alter.timeout_s = "r", 20.0
    asked.alter.added.CopyFrom(codec.encode(capture(rows(0).set("z", rows(0)["a"])[0]).spec.select([("z",)])))
    return asked


class HeldUp:
    """Stands for the step that moves the files of a change of structure: it waits until it may go on.

    Args:
        finds_room: Whether the first attempt does.
    """

    def __init__(self, *, finds_room: bool) -> None:
        self._carry_out = restructuring.carry_out
        self._finds_room = finds_room
        self.has_begun = threading.Event()
        self.may_go_on = threading.Event()

    def __call__(self, *arguments: Any) -> None:
        self.has_begun.set()
        assert self.may_go_on.wait(20.0)
        if not self._finds_room:
            self._finds_room = True
            raise CapacityError(what="the disk", asked=4096, free=0)
        self._carry_out(*arguments)


def test_delete_when_the_store_is_sealed_just_now_then_refused_and_its_retry_deletes(
    world: World, run: Loop, requests: Requests
) -> None:
    store, session = create(world, run), world.session()
    delete = control_pb2.ClientMessage(request=7)
    delete.delete_store.name = store.name

    async def scenario() -> None:
        loop = asyncio.get_running_loop()
        loop.call_soon(lambda: session.run_at_once(requests.serve(session, delete), 7))  # before the seal begins
        await asyncio.create_task(pause(world.services.moves, store))
        await session.finish(20.0)
        assert isinstance(outbox(session).error(), StoreMovedError)
        assert store.name in world.stores.catalog
        await requests.serve(session, delete)
        outbox(session).done()
        assert store.name not in world.stores.catalog

    run(scenario())


@pytest.mark.parametrize("finds_room", [True, False])
def test_leaves_when_a_seal_comes_in_their_last_step_then_they_come_and_what_is_at_rest_has_them(
    world: World, run: Loop, requests: Requests, finds_room: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, session = create(world, run), world.session()
    extend(world, run, store, rows(10))
    asked = adding_z()
    moving = HeldUp(finds_room=finds_room)
    monkeypatch.setattr("tdserve.server.tables.added_leaves.RETRY_EVERY_S", 0.01)
    monkeypatch.setattr(restructuring, "carry_out", moving)

    async def scenario() -> StoreRecord:
        adding = asyncio.create_task(requests.serve(session, asked))
        await asyncio.to_thread(moving.has_begun.wait, 20.0)
        sealing = asyncio.create_task(pause(world.services.moves, store))
        while not store.waiters.is_away:  # noqa: ASYNC110 (it has begun in a turn or two)
            await asyncio.sleep(0)
        moving.may_go_on.set()
        await adding
        return await sealing

    resting, now = run(scenario()), world.stores.get(store.name)
    assert outbox(session).done().version == now.record.structure == resting.structure == 1
    assert extend(world, run, now, rows(20).set("z", rows(20)["a"]), request=8) == [3, 4, 5]


def test_leaves_when_they_still_lack_room_after_a_restart_then_a_seal_waits_for_them(
    world: World, run: Loop, monkeypatch: pytest.MonkeyPatch
) -> None:
    create(world, run)

    def refuse(*_: Any) -> None:
        raise CapacityError(what="the disk", asked=4096, free=0)

    async def start_adding() -> None:
        adding = asyncio.create_task(world.alterations.alter(world.session(), 7, adding_z().alter))
        while not Restructured.load(world.db):  # noqa: ASYNC110 (a record tells nobody that it is there)
            await asyncio.sleep(0)
        world.alterations.close()
        await adding

    async def scenario() -> StoreRecord:
        await world.alterations.repair()
        store, leaving = world.stores.get("r"), world.services.moves.leaving
        with pytest.raises(DeadlineExceededError, match="room for new leaves"):
            await leaving.seal(store, SEAL, Deadline.after(0.05))
        patch.undo()
        resting = await pause(world.services.moves, store)
        assert Restructured.load(world.db) == []
        return resting

    monkeypatch.setattr("tdserve.server.tables.added_leaves.RETRY_EVERY_S", 0.01)
    with monkeypatch.context() as patch:
        patch.setattr(restructuring, "carry_out", refuse)
        run(start_adding())
        world.reopen()
        assert run(scenario()).structure == 1


def test_alter_when_a_seal_comes_while_its_files_find_no_room_then_the_seal_waits_for_it(
    world: World, run: Loop, requests: Requests, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, session = run(world.create("x", rows(0))), world.session()
    asked = control_pb2.ClientMessage(request=7)
    asked.alter.store, asked.alter.timeout_s = "x", 20.0
    asked.alter.removed.add(parts=["g"])
    moving = HeldUp(finds_room=False)
    moving.may_go_on.set()
    monkeypatch.setattr("tdserve.server.tensordicts.alterations.RETRY_EVERY_S", 0.01)
    monkeypatch.setattr(restructuring, "carry_out", moving)

    async def scenario() -> StoreRecord:
        await requests.serve(session, asked)
        outbox(session).done()
        assert store.writes  # nobody can read it
        return await pause(world.services.moves, store)

    assert run(scenario()).structure == 1
    assert store.generations is not None
    assert store.generations.structure == 1
    assert not (store.get_generation_values() & 1).any()


def test_seal_when_the_store_was_deleted_just_before_then_not_found(world: World, run: Loop) -> None:
    store = create(world, run)
    run(world.stores.delete(store))
    with pytest.raises(StoreNotFoundError):
        run(pause(world.services.moves, store))
    assert world.stores.seals.find(store.name) is None
