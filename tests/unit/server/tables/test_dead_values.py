from __future__ import annotations

import asyncio

import numpy as np
import pytest
from tensordict import NonTensorData, NonTensorStack, TensorDict

from tdserve.base.errors import CapacityError, PeerLostError
from tdserve.server.movers.permit_mover import read_values
from tdserve.server.open_store.opened_store import OpenedStore
from tdserve.server.tables.dead_values import DeadValues
from tdserve.values.value_columns import decode_block
from tests.unit.rules.replay.tables import clear, delete
from tests.unit.server.replaying import extend
from tests.unit.server.world import Loop, World

FULL = CapacityError(what="non-tensor values of store 'v'", asked=8, free=0)


@pytest.fixture
def table(world: World, run: Loop) -> OpenedStore:
    """Four rows with a text each."""
    store = run(world.create_replay("v", TensorDict({"v": NonTensorData("x")}, []), 6))
    extend(world, run, store, TensorDict({"v": NonTensorStack(*[f"row {number}" for number in range(4)])}, [4]))
    return store


def values(world: World, run: Loop, store: OpenedStore) -> list[bool]:
    """Returns which of the rows have a value."""
    ((_, found),) = decode_block(run(read_values(world.worker, store, [("v",)], np.arange(4))))
    return [b"row" in bytes(value) for value in found]  # a free row may have none


def test_make_room_when_rows_have_left_then_their_values_go_and_no_others(
    world: World, run: Loop, table: OpenedStore
) -> None:
    dead = DeadValues(world.stores, world.worker)
    delete(table.get_table(), np.array([1, 3]))
    assert values(world, run, table) == [True] * 4
    assert run(dead.make_room("v", FULL))
    assert values(world, run, table) == [True, False, True, False]
    assert table.get_table().info()["num_reserved"] == 0
    assert not run(dead.make_room("v", FULL))  # there is nothing more to be done
    assert extend(world, run, table, TensorDict({"v": NonTensorStack("row 9")}, [1]), request=2) == [1]


def test_make_room_when_several_ask_at_once_then_there_is_room_for_all(
    world: World, run: Loop, table: OpenedStore
) -> None:
    dead = DeadValues(world.stores, world.worker)
    clear(table.get_table())

    async def ask() -> list[bool]:
        return list(await asyncio.gather(dead.make_room("v", FULL), dead.make_room("v", FULL)))

    assert run(ask()) == [True, True]


def test_make_room_when_no_row_has_left_then_nothing(world: World, run: Loop, table: OpenedStore) -> None:
    assert not run(DeadValues(world.stores, world.worker).make_room("v", FULL))
    assert not run(DeadValues(world.stores, world.worker).make_room("another", FULL))
    assert values(world, run, table) == [True] * 4


def test_make_room_when_it_was_not_for_values_that_there_was_no_room_then_nothing(
    world: World, run: Loop, table: OpenedStore
) -> None:
    """Values of free rows may be those of the very write that found no room."""
    clear(table.get_table())
    dead = DeadValues(world.stores, world.worker)
    assert not run(dead.make_room("v", CapacityError(what=f"{world.root.path / 'catalog'} (full)", asked=8, free=0)))
    assert values(world, run, table) == [True] * 4
    assert run(dead.make_room("v", CapacityError(what=f"{table.folder / 'objects'} (full)", asked=8, free=0)))


def test_make_room_when_the_worker_is_gone_then_the_rows_are_free_again(
    world: World, run: Loop, table: OpenedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lost(order: object) -> asyncio.Future[None]:
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        future.set_exception(PeerLostError(peer="data worker 0", reason="it died"))
        return future

    clear(table.get_table())
    monkeypatch.setattr(world.worker, "submit", lost)
    assert not run(DeadValues(world.stores, world.worker).make_room("v", FULL))
    info = table.get_table().info()
    assert (info["num_reserved"], info["num_holes"]) == (0, 4)
