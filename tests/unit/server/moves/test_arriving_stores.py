"""A store after moves that are given up, cut short or overtaken, or whose client is gone."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tdserve.base.errors import InvalidRequestError, StoreExistsError, TDServeError, WrongStateError
from tdserve.rules.catalog import IS_COMING
from tdserve.server.moves.arriving_stores import ArrivingStores
from tdserve.store.roots import moved_files
from tdserve.v1 import control_pb2
from tests.unit.server.catalog.test_creation import REPLAY, make_request
from tests.unit.server.moves.test_moves import MOVE, make_arriving, make_table, release, seal
from tests.unit.server.world import Loop, World

LATER = f"{8:032x}"
MOVER, OTHER = b"mover", b"other"
TIMEOUT_S = 30.0


class Source:
    """A table that has been released, and the store that arrives."""

    def __init__(self, world: World, run: Loop) -> None:
        store = make_table(world, run)
        self.uid = store.record.uid
        self.sealed = seal(world, run, store)
        files = [(path, (store.folder / path.decode()).read_bytes()) for path in self.sealed.files.paths]
        self.blocks = [control_pb2.FileBlock(path=path, content=content) for path, content in files]
        release(world, run, self.uid)

    async def bring(self, arriving: ArrivingStores, move: str = MOVE, client_id: bytes = MOVER) -> None:
        """Brings all files."""
        await arriving.receive("x", move, self.sealed.files, client_id=client_id)
        await arriving.write(move, self.blocks)

    async def complete(self, arriving: ArrivingStores, move: str = MOVE, *, is_copy: bool = False) -> None:
        """Takes the next step."""
        moved = control_pb2.MovedStore.FromString(self.sealed.store.SerializeToString())
        moved.is_copy = is_copy
        await arriving.complete("x", move, moved)


@pytest.fixture
def source(world: World, run: Loop) -> Source:
    return Source(world, run)


@pytest.fixture
def arriving(world: World) -> ArrivingStores:
    return make_arriving(world)


def list_left(world: World) -> tuple[list[str], list[str]]:
    """Returns the moves of which there are files, and those on record."""
    folders = sorted(folder.name for folder in world.root.list_arriving())
    return folders, sorted(key.decode() for key, _ in world.db.scan("arriving"))


async def until_over(arriving: ArrivingStores, move: str = MOVE) -> None:
    """Returns once the steps of a move that have begun are over: the next has been refused."""
    with pytest.raises(TDServeError):
        await arriving.show("absent", move)


class Held:
    """Holds a step of the first move up in the thread that does its work.

    Args:
        work: Name of what the thread does, in ``moved_files``.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, work: str) -> None:
        carry_out = getattr(moved_files, work)
        self._has_begun, self._goes_on = threading.Event(), threading.Event()

        def hold(folder: Path, *arguments: Any) -> None:
            if folder.name == MOVE:
                self._has_begun.set()
                assert self._goes_on.wait(TIMEOUT_S)
            carry_out(folder, *arguments)

        monkeypatch.setattr(moved_files, work, hold)

    async def wait(self) -> None:
        """Waits until the thread is there."""
        assert await asyncio.to_thread(self._has_begun.wait, TIMEOUT_S)

    async def let_go(self) -> None:
        """Lets it go on, after everything that can be done meanwhile."""
        for _ in range(5):
            await asyncio.sleep(0)
        self._goes_on.set()


@pytest.mark.parametrize("is_cancelled", [False, True])
def test_give_up_when_files_are_still_being_made_then_none_is_left(
    world: World, run: Loop, arriving: ArrivingStores, monkeypatch: pytest.MonkeyPatch, is_cancelled: bool
) -> None:
    async def scenario() -> None:
        held = Held(monkeypatch, "set_files")
        sizes = control_pb2.FileSizes(paths=[b"rows/a"], nbytes=[10])
        receiving = asyncio.create_task(arriving.receive("x", MOVE, sizes, client_id=MOVER))
        await held.wait()
        if is_cancelled:  # its session has ended
            receiving.cancel()
        giving_up = asyncio.create_task(arriving.give_up(MOVE))
        await held.let_go()
        await asyncio.wait([receiving, giving_up])
        giving_up.result()

    run(scenario())
    assert list_left(world) == ([], [])


@pytest.mark.parametrize("move", ["", "..", "a/b"])
def test_steps_when_the_move_has_no_id_then_refused_and_what_has_come_stays(
    world: World, run: Loop, source: Source, arriving: ArrivingStores, move: str
) -> None:
    run(source.bring(arriving))
    run(source.complete(arriving))
    for step in (arriving.give_up(move), arriving.show("x", move)):
        with pytest.raises(InvalidRequestError):
            run(step)
    assert list_left(world) == ([MOVE], [MOVE])


def test_give_up_when_the_store_is_being_completed_then_neither_files_nor_record_are_left(
    world: World, run: Loop, source: Source, arriving: ArrivingStores, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        await source.bring(arriving)
        held = Held(monkeypatch, "sync_files")
        completing = asyncio.create_task(source.complete(arriving))
        await held.wait()
        giving_up = asyncio.create_task(arriving.give_up(MOVE))
        await held.let_go()
        await asyncio.gather(completing, giving_up)

    run(scenario())
    assert list_left(world) == ([], [])


def test_complete_when_given_up_then_refused(world: World, run: Loop, source: Source, arriving: ArrivingStores) -> None:
    async def scenario() -> None:
        await source.bring(arriving)
        await arriving.give_up(MOVE)
        with pytest.raises(WrongStateError, match="given up"):
            await source.complete(arriving)

    run(scenario())
    assert list_left(world) == ([], [])


def test_complete_when_another_move_was_released_then_that_is_shown_and_this_one_removed(
    world: World, run: Loop, source: Source, arriving: ArrivingStores
) -> None:
    async def scenario() -> None:
        for move in (MOVE, LATER):
            await source.bring(arriving, move)
        await source.complete(arriving, LATER)
        await source.complete(arriving)  # its mover does not know that the seal was lost
        assert list_left(world) == ([MOVE, LATER], [MOVE, LATER])
        await arriving.show("x", LATER)

    run(scenario())
    assert world.stores.get("x").record.uid == source.uid
    assert list_left(world) == ([], [])


def test_complete_when_another_move_has_shown_the_store_meanwhile_then_refused_and_a_restart_serves_that_one(
    world: World, run: Loop, source: Source, arriving: ArrivingStores, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        for move in (MOVE, LATER):
            await source.bring(arriving, move)
        await source.complete(arriving, LATER)
        held = Held(monkeypatch, "sync_files")
        completing = asyncio.create_task(source.complete(arriving))
        await held.wait()
        await arriving.show("x", LATER)
        await held.let_go()
        with pytest.raises(WrongStateError, match="'x' has come by another move"):
            await completing

    run(scenario())
    folder = world.stores.get("x").folder
    (folder / "shown").touch()
    make_arriving(world).restore()
    assert (folder / "shown").exists()
    assert list_left(world) == ([], [])


def test_complete_when_another_store_has_got_the_name_meanwhile_then_refused(
    world: World, run: Loop, source: Source, arriving: ArrivingStores, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        await source.bring(arriving)
        held = Held(monkeypatch, "sync_files")
        completing = asyncio.create_task(source.complete(arriving))
        await held.wait()
        forward = world.stores.catalog.get("x")
        world.stores.catalog.remove("x")
        world.stores.catalog.add(replace(forward, kind="tensordict", uid=f"{9:032x}"))
        await held.let_go()
        with pytest.raises(StoreExistsError):
            await completing

    run(scenario())
    assert list_left(world) == ([MOVE], [])


@pytest.mark.parametrize("is_restarted", [False, True])
def test_creation_when_a_store_of_the_name_has_come_then_refused_until_the_move_is_over(
    world: World, run: Loop, source: Source, arriving: ArrivingStores, is_restarted: bool
) -> None:
    async def complete() -> None:
        await source.bring(arriving)
        world.stores.catalog.remove("x")  # where it was is not on record at another server
        await source.complete(arriving)

    run(complete())
    if is_restarted:
        world.db.delete("stores", b"x")
        world.reopen()
        arriving = make_arriving(world)
        arriving.restore()
    for asked in ({"kind": REPLAY, "capacity": 10}, {"kind": control_pb2.STORE_KIND_TENSORDICT}):
        with pytest.raises(StoreExistsError) as caught:
            run(world.creation.create(make_request(name="x", **asked)))
        assert caught.value.reason == IS_COMING
    run(arriving.show("x", MOVE))  # it was released
    assert world.stores.get("x").record.uid == source.uid


def test_creation_when_the_store_that_has_come_is_given_up_then_the_name_is_free(
    world: World, run: Loop, source: Source, arriving: ArrivingStores
) -> None:
    async def scenario() -> None:
        await source.bring(arriving)
        world.stores.catalog.remove("x")
        await source.complete(arriving)
        await arriving.give_up(MOVE)

    run(scenario())
    assert run(world.creation.create(make_request(name="x", kind=REPLAY, capacity=10))).created


def test_complete_when_a_store_of_the_name_is_being_created_then_refused(
    world: World, run: Loop, source: Source, arriving: ArrivingStores
) -> None:
    async def scenario() -> None:
        await source.bring(arriving)
        forward = world.stores.catalog.remove("x")
        world.stores.catalog.add(replace(forward, kind="tensordict", uid=f"{9:032x}", loading=True))
        with pytest.raises(StoreExistsError):
            await source.complete(arriving)

    run(scenario())


def test_forget_client_when_it_was_bringing_a_store_then_only_what_it_has_brought_is_removed(
    world: World, run: Loop, source: Source, arriving: ArrivingStores
) -> None:
    async def scenario() -> None:
        await source.bring(arriving)
        await source.bring(arriving, LATER, OTHER)
        arriving.forget_client(MOVER)
        await until_over(arriving)

    run(scenario())
    assert list_left(world) == ([LATER], [])
    assert arriving.list_clients() == {OTHER}


@pytest.mark.parametrize("is_restarted", [False, True])
@pytest.mark.parametrize("is_copy", [False, True])
def test_forget_client_when_a_store_is_complete_then_removed_only_if_it_is_a_copy(
    world: World, run: Loop, source: Source, arriving: ArrivingStores, is_copy: bool, is_restarted: bool
) -> None:
    async def complete() -> None:
        await source.bring(arriving)
        await source.complete(arriving, is_copy=is_copy)

    run(complete())
    after = arriving
    if is_restarted:
        world.reopen()
        after = make_arriving(world)
        after.restore()
    assert after.list_clients() == {MOVER}

    async def forget() -> None:
        after.forget_client(MOVER)
        await until_over(after)

    run(forget())
    if is_copy:
        assert list_left(world) == ([], [])
        return
    run(after.show("x", MOVE))  # it was released
    assert world.stores.get("x").record.uid == source.uid
    assert (list_left(world), after.list_clients()) == (([], []), set())


def test_show_when_asked_twice_at_once_then_both_find_the_store(
    world: World, run: Loop, source: Source, arriving: ArrivingStores
) -> None:
    async def scenario() -> None:
        await source.bring(arriving)
        await source.complete(arriving)
        await asyncio.gather(arriving.show("x", MOVE), arriving.show("x", MOVE))

    run(scenario())
    assert world.stores.get("x").record.uid == source.uid
