from __future__ import annotations

import asyncio

import pytest
import torch
from tensordict import TensorDict

from tdserve.base import failpoints
from tdserve.base.deadline import Deadline
from tdserve.base.errors import (
    CapacityError,
    DeadlineExceededError,
    NotSupportedError,
    StoreExistsError,
    StoreMovedError,
    WrongStateError,
)
from tdserve.rules.placement import PlacementRecord
from tdserve.server.catalog.seals import Seal
from tdserve.server.moves.arriving_stores import ArrivingStores
from tdserve.server.moves.leaving_stores import LeavingStores
from tdserve.server.open_store.opened_store import OpenedStore
from tdserve.server.weights.relays import MIN_RELAYED_BYTES
from tdserve.structure.captures.capture import capture
from tdserve.v1 import control_pb2
from tests.unit.server.catalog.test_creation import REPLAY, make_request
from tests.unit.server.replaying import create
from tests.unit.server.weights.publishes import publish
from tests.unit.server.world import Loop, World

SESSION, OTHER = 3, 4
MOVE = f"{7:032x}"
SEAL = Seal(SESSION, MOVE)
LARGE = capture(TensorDict({"w": torch.zeros(MIN_RELAYED_BYTES // 4)}, [])).spec


def make_table(world: World, run: Loop, name: str = "x") -> OpenedStore:
    run(world.creation.create(make_request(name=name, kind=REPLAY, capacity=10)))
    return world.stores.get(name)


def get_leaving(world: World) -> LeavingStores:
    return world.services.moves.leaving


def seal(world: World, run: Loop, store: OpenedStore, timeout_s: float = 5.0) -> control_pb2.MoveAnswer:
    return run(get_leaving(world).seal(store, SEAL, Deadline.after(timeout_s)))


def make_arriving(world: World) -> ArrivingStores:
    return ArrivingStores(world.stores, world.services.syncing)


def bring(world: World, run: Loop, sealed: control_pb2.MoveAnswer, contents: dict[bytes, bytes]) -> None:
    """Takes the steps of a move at the target, except the last."""
    arriving = make_arriving(world)
    run(arriving.receive("x", MOVE, sealed.files, client_id=b"mover"))
    for path, content in contents.items():
        run(arriving.write(MOVE, [control_pb2.FileBlock(path=path, content=content)]))
    run(arriving.complete("x", MOVE, sealed.store))


def release(world: World, run: Loop, uid: str) -> None:
    run(get_leaving(world).release("x", uid, SEAL, 1))


def test_seal_when_made_then_requests_are_refused_until_its_session_ends(world: World, run: Loop) -> None:
    store = make_table(world, run)
    seal(world, run, store)
    with pytest.raises(StoreMovedError, match="at rest"):
        world.stores.seals.begin_request("x")
    with pytest.raises(StoreMovedError):
        store.check_present()
    with pytest.raises(StoreMovedError):
        world.stores.seals.seal("x", Seal(SESSION, f"{8:032x}"))  # another move of the same client
    get_leaving(world).unseal("x", Seal(OTHER, MOVE))
    get_leaving(world).on_session_ended(OTHER)
    assert world.stores.seals.find("x") == SEAL
    get_leaving(world).on_session_ended(SESSION)
    world.stores.seals.begin_request("x")
    store.check_present()


def test_seal_when_a_request_does_not_end_then_the_store_serves_again(world: World, run: Loop) -> None:
    store = make_table(world, run)
    world.stores.seals.begin_request("x")
    with pytest.raises(DeadlineExceededError, match="under way"):
        seal(world, run, store, timeout_s=0.05)
    world.stores.seals.end_request("x")
    world.stores.seals.begin_request("x")
    store.check_present()


def test_seal_when_its_session_ends_while_it_waits_then_the_store_serves_again(world: World, run: Loop) -> None:
    store = make_table(world, run)
    leaving = get_leaving(world)
    world.stores.seals.begin_request("x")

    async def end_session() -> None:
        sealing = asyncio.ensure_future(leaving.seal(store, SEAL, Deadline.after(5.0)))
        while not world.stores.seals.find("x"):  # noqa: ASYNC110 (it has begun in a turn or two)
            await asyncio.sleep(0)
        leaving.on_session_ended(SESSION)
        world.stores.seals.end_request("x")
        with pytest.raises(WrongStateError, match="is over"):
            await sealing

    run(end_session())
    world.stores.seals.begin_request("x")
    store.check_present()


def test_release_when_made_then_a_record_of_the_place_is_left(world: World, run: Loop) -> None:
    store = make_table(world, run)
    seal(world, run, store)
    release(world, run, store.record.uid)
    release(world, run, store.record.uid)  # a retry
    with pytest.raises(StoreMovedError, match="server 1"):
        world.stores.seals.check_here("x")
    assert not store.folder.exists()
    world.reopen()
    with pytest.raises(StoreMovedError, match="server 1"):
        world.stores.seals.check_here("x")


def test_release_when_versions_of_it_are_passed_on_then_their_relays_forget_it(world: World, run: Loop) -> None:
    publish(world, run, 1)
    store, relays = world.stores.get("w"), world.services.relays
    version = store.get_versions().get(1)

    async def make() -> bytes:
        return b""

    async def place() -> None:
        asked = control_pb2.LatestRequest(relays=True)
        placed = await relays.place(world.session(), store, version, LARGE, asked, Deadline.after(5.0), make)
        with relays.track_sending(store, placed):
            assert len(relays) == 1

    run(place())
    seal(world, run, store)
    run(get_leaving(world).release("w", store.record.uid, SEAL, 1))
    assert len(relays) == 0


def test_store_when_it_comes_back_then_as_it_was(world: World, run: Loop) -> None:
    store = make_table(world, run)
    uid, sealed = store.record.uid, seal(world, run, store)
    contents = {path: (store.folder / path.decode()).read_bytes() for path in sealed.files.paths}
    with pytest.raises(StoreExistsError):  # it has not been released
        bring(world, run, sealed, contents)
    release(world, run, uid)
    bring(world, run, sealed, contents)
    world.reopen()
    make_arriving(world).restore()  # what has come stays
    run(make_arriving(world).show("x", MOVE))
    run(make_arriving(world).show("x", MOVE))  # a retry
    assert world.stores.get("x").record.uid == uid
    world.reopen()
    make_arriving(world).restore()
    assert world.stores.get("x").record.uid == uid


def test_show_when_a_crash_comes_before_the_files_have_their_place_then_the_restart_moves_them(
    world: World, run: Loop
) -> None:
    store = make_table(world, run)
    uid, sealed = store.record.uid, seal(world, run, store)
    contents = {path: (store.folder / path.decode()).read_bytes() for path in sealed.files.paths}
    release(world, run, uid)
    bring(world, run, sealed, contents)
    where_it_was = world.stores.get("x")  # which has files, since somebody has used it
    with world.db.begin_transaction() as txn:  # as far as the crash lets it come
        txn.put("stores", b"x", sealed.store.record)
        txn.put("states", uid.encode(), sealed.store.state)
    world.reopen()
    make_arriving(world).restore()
    assert world.stores.get("x").record.uid == uid
    assert world.stores.get("x").folder == where_it_was.folder
    assert world.root.list_arriving() == []


@pytest.mark.parametrize("is_used", [False, True])
def test_show_when_the_catalog_is_full_then_the_record_of_where_it_was_stays(
    world: World, run: Loop, is_used: bool
) -> None:
    store = make_table(world, run)
    uid, sealed = store.record.uid, seal(world, run, store)
    contents = {path: (store.folder / path.decode()).read_bytes() for path in sealed.files.paths}
    release(world, run, uid)
    bring(world, run, sealed, contents)
    if is_used:
        world.stores.get("x")
    failpoints.arm("catalog.written=ENOSPC")
    try:
        with pytest.raises(CapacityError):
            run(make_arriving(world).show("x", MOVE))
    finally:
        failpoints.arm("")
    with pytest.raises(StoreMovedError, match="server 1"):
        world.stores.seals.check_here("x")
    run(make_arriving(world).show("x", MOVE))
    assert world.stores.get("x").record.uid == uid


def test_receive_when_another_move_was_released_then_that_is_kept(world: World, run: Loop) -> None:
    store = make_table(world, run)
    uid, sealed = store.record.uid, seal(world, run, store)
    contents = {path: (store.folder / path.decode()).read_bytes() for path in sealed.files.paths}
    release(world, run, uid)
    bring(world, run, sealed, contents)
    run(
        make_arriving(world).receive("x", f"{8:032x}", sealed.files, client_id=b"mover")
    )  # of a mover that came too late
    run(make_arriving(world).show("x", MOVE))
    assert world.stores.get("x").record.uid == uid


def test_restart_when_files_came_in_part_then_they_are_removed(world: World, run: Loop) -> None:
    sizes = control_pb2.FileSizes(paths=[b"rows/a"], nbytes=[10])
    run(make_arriving(world).receive("x", MOVE, sizes, client_id=b"mover"))
    (folder,) = world.root.list_arriving()
    assert (folder / "rows/a").stat().st_size == 10
    make_arriving(world).restore()
    assert world.root.list_arriving() == []


def test_find_when_a_table_follows_a_policy_then_both_may_move(world: World, run: Loop) -> None:
    run(world.creation.create(make_request(name="p", kind=control_pb2.STORE_KIND_WEIGHTS)))
    create(world, run, policy="p")
    for name in ("r", "p"):
        assert get_leaving(world).find(name).name == name


def test_find_when_it_is_a_record_then_refused(world: World, run: Loop) -> None:
    placement = PlacementRecord("replay", (0, 1))
    request = control_pb2.MoveRequest(store="x", place=placement.to_json())
    run(world.services.moves.place(request.store, request.place))
    with pytest.raises(NotSupportedError, match="parts"):
        get_leaving(world).find("x")
    run(world.services.moves.place("x", PlacementRecord("replay", (2, 1)).to_json()))
    record = world.stores.catalog.get("x")
    assert PlacementRecord.from_json(record.settings).servers == (2, 1)
    for wrong in ({"expected": placement.to_json()}, {"expected": "{}"}):
        with pytest.raises(WrongStateError):
            run(world.services.moves.place("x", placement.to_json(), **wrong))
    run(world.services.moves.place("x", "", move=MOVE))
    assert "x" in world.stores.catalog  # it is no record of this move
    forward = PlacementRecord.make_forward(1, MOVE)
    run(world.services.moves.place("x", forward.to_json()))
    run(world.services.moves.place("x", "", move=f"{8:032x}"))
    assert "x" in world.stores.catalog
    run(world.services.moves.place("x", "", move=MOVE))
    assert "x" not in world.stores.catalog
