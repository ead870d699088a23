"""Extends of very many rows that form trajectories: the rows are linked a few at a time before the commit is on
record."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from tdserve.base.errors import CapacityError
from tdserve.messages.row_numbers import PIECE_ROWS
from tdserve.rules.replay.eligibility.conditions import PLAIN
from tdserve.rules.replay.samplers.slices import Slices
from tdserve.rules.replay.samplers.trajectories import Trajectories
from tdserve.rules.replay.settings import Settings
from tdserve.server.open_store.opened_store import OpenedStore
from tdserve.v1 import control_pb2
from tests.unit.server.world import Loop, World, content_of, turns_during

NUM_ROWS = PIECE_ROWS // 2 + 5
"""Rows of one extend: three parts."""

CAPACITY = 2 * PIECE_ROWS


@pytest.fixture(params=[None, "a"])
def store(world: World, run: Loop, request: pytest.FixtureRequest) -> OpenedStore:
    """A table of slices. Its writers say where a trajectory ends, or its rows say to which trajectory they belong."""
    kind, like = control_pb2.STORE_KIND_REPLAY, TensorDict({"a": torch.tensor(0)}, [])
    settings = Settings(sampler=Slices(slice_len=4, trajectory_key=request.param)).to_json()
    return run(world.create("r", like, kind=kind, capacity=CAPACITY, settings=settings))


def rows_of(store: OpenedStore) -> list[int]:
    """Returns the trajectory that begins with the first row."""
    found = links(store).follow(np.array([0]), CAPACITY)[0]
    return [int(row) for row in found[found >= 0]]


def links(store: OpenedStore) -> Trajectories:
    """Returns the links between its rows."""
    found: Trajectories | None = store.get_table().columns.trajectories
    assert found is not None
    return found


def extend(world: World, store: OpenedStore, num_rows: int, request: int) -> Coroutine[Any, Any, control_pb2.Done]:
    """Extends by this many rows of one trajectory of one writer."""
    content = content_of(TensorDict({"a": torch.ones(num_rows, dtype=torch.int64)}, [num_rows]), store.spec.fingerprint)
    asked = control_pb2.ExtendRequest(store=store.name, num_rows=num_rows, content=content, timeout_s=30.0)
    session = world.session_of(control_pb2.Hello(client_id=bytes(16), transport="gloo"), 1)
    return world.extends.extend(session, request, asked)


async def until(is_so: Callable[[], bool], work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
    """Begins some work, and returns between two of its turns as soon as a condition holds."""
    task = asyncio.ensure_future(work)
    while not is_so():
        assert not task.done()
        await asyncio.sleep(0)
    return task


def test_extend_when_a_trajectory_is_very_long_then_others_are_served_and_it_is_one(
    world: World, run: Loop, store: OpenedStore
) -> None:
    run(extend(world, store, 1, 1))
    assert run(turns_during(extend(world, store, NUM_ROWS, 2))) > 6
    run(extend(world, store, 1, 3))
    assert rows_of(store) == [*range(NUM_ROWS + 2)]
    assert len(store.get_table().selectors.get(PLAIN)) == NUM_ROWS + 2
    world.reopen()
    assert rows_of(world.stores.get("r")) == [*range(NUM_ROWS + 2)]


def test_extend_when_the_same_writer_extends_meanwhile_then_no_row_comes_between(
    world: World, run: Loop, store: OpenedStore
) -> None:
    run(extend(world, store, 1, 1))

    async def scenario() -> None:
        long = await until(lambda: links(store).after[0] != -1, extend(world, store, NUM_ROWS, 2))
        await extend(world, store, 2, 3)
        await long

    run(scenario())
    assert rows_of(store) == [*range(NUM_ROWS + 3)]


def test_extend_when_a_crash_comes_between_two_turns_then_the_trajectory_is_whole_or_as_before(
    world: World, run: Loop, store: OpenedStore
) -> None:
    run(extend(world, store, 1, 1))

    async def killed(is_so: Callable[[OpenedStore], bool], request: int) -> None:
        store = world.stores.get("r")
        task = await until(lambda: is_so(store), extend(world, store, NUM_ROWS, request))
        task.cancel()
        await asyncio.wait({task})

    run(killed(lambda store: 0 < store.get_table().state.num_coming < NUM_ROWS, 2))
    world.reopen()
    assert rows_of(world.stores.get("r")) == [*range(NUM_ROWS + 1)]
    run(killed(lambda store: bool(links(store).before[NUM_ROWS + 2] > 0), 3))
    world.reopen()
    assert rows_of(world.stores.get("r")) == [*range(NUM_ROWS + 1)]
    assert len(world.stores.get("r").get_table()) == NUM_ROWS + 1


def test_extend_when_the_record_fails_then_the_trajectory_goes_on_where_it_was(
    world: World, run: Loop, store: OpenedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(extend(world, store, 1, 1))
    for num_rows, request in ((NUM_ROWS, 2), (3, 3)):
        with monkeypatch.context() as patch:
            patch.setattr(world.stores, "save_state", refuse)
            with pytest.raises(CapacityError):
                run(extend(world, store, num_rows, request))
        assert links(store).after.max() == -1
        assert links(store).num_open == 1
    run(extend(world, store, 2, 4))
    assert rows_of(store) == [0, 4, 5]  # which were given up first


def refuse(*_: object) -> None:
    """Refuses as a catalog without room does."""
    raise CapacityError(what="the catalog", asked=1, free=0)
