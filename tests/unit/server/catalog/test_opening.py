from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from tdserve.base.errors import CorruptDataError, InvalidSpecError, StoreNotFoundError
from tdserve.rules.catalog import StoreRecord
from tdserve.rules.replay.settings import Settings
from tdserve.rules.replay.table import Table
from tdserve.rules.replay.table_state import TableState
from tdserve.server.catalog.opening import LongOpening
from tdserve.server.kinds.all_kinds import KINDS
from tdserve.server.kinds.table_kind import LONG_ROWS
from tdserve.server.open_store.opened_store import OpenedStore
from tdserve.store.rows.generations import FILE_NAME
from tdserve.structure.captures.capture import capture
from tdserve.v1 import control_pb2
from tests.unit.server.world import Loop, World, turns_during

SPEC = capture(TensorDict({"a": torch.zeros(4, 2)}, [4])).spec
RECORD = StoreRecord(name="x", kind="tensordict", uid="", fingerprint=SPEC.fingerprint, num_rows=4)
ROW = TensorDict({"a": torch.zeros(())}, [])


def create(world: World, run: Loop, capacity: int = LONG_ROWS) -> OpenedStore:
    kind, settings = control_pb2.STORE_KIND_REPLAY, Settings().to_json()
    return run(world.create("t", ROW, kind=kind, capacity=capacity, settings=settings))


def _entry_of(table: Table) -> OpenedStore:
    return OpenedStore(RECORD, SPEC, None, table=table)  # type: ignore[arg-type]


def _slow(may_end: threading.Event) -> Callable[[], Table]:
    def make() -> Table:
        assert may_end.wait(30.0)
        return Table(TableState("t", 4, np.zeros(4, np.int64), Settings()))

    return make


def test_opening_when_it_takes_long_then_the_loop_goes_on_and_waiting_calls_in_order(run: Loop) -> None:
    async def go() -> list[str]:
        may_end, order = threading.Event(), []
        opening = LongOpening(RECORD, _slow(may_end), _entry_of)

        async def wait(name: str) -> None:
            await opening.wait()
            order.append(name)

        waiting = [asyncio.ensure_future(wait(name)) for name in ("first", "second")]
        await asyncio.sleep(0)
        order.append("the loop")
        may_end.set()
        await asyncio.gather(*waiting)
        assert opening.get_store().table is not None
        return order

    assert run(go()) == ["the loop", "first", "second"]


def test_outlast_when_cancelled_then_ends_only_after_the_thread(run: Loop) -> None:
    async def go() -> None:
        may_end = threading.Event()
        opening = LongOpening(RECORD, _slow(may_end), _entry_of)
        task = asyncio.ensure_future(opening.outlast())
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert not task.done()
        may_end.set()
        with pytest.raises(asyncio.CancelledError):
            await task

    run(go())


def test_open_apart_when_a_table_has_very_many_rows_then_it_is_opened_once_for_all(world: World, run: Loop) -> None:
    create(world, run)
    world.reopen()
    assert world.stores.is_long_to_open("t")

    async def both() -> None:
        await asyncio.gather(world.stores.open_apart("t"), world.stores.open_apart("t"))
        assert world.stores.find("t") is world.stores.find("t")

    assert run(turns_during(both())) > 1
    assert not world.stores.is_long_to_open("t")
    assert len(world.stores.get("t").get_table()) == 0


def test_find_when_a_thread_opens_the_table_just_now_then_its_entry_is_the_only_one(world: World, run: Loop) -> None:
    create(world, run)
    world.reopen()

    async def go() -> None:
        opening = asyncio.ensure_future(world.stores.open_apart("t"))
        await asyncio.sleep(0)
        store = world.stores.get("t")
        await opening
        await world.stores.open_apart("t")
        assert world.stores.get("t") is store

    run(go())


def test_open_apart_when_the_table_is_deleted_and_made_anew_meanwhile_then_the_new_one_counts(
    world: World, run: Loop
) -> None:
    create(world, run)
    world.reopen()

    async def go() -> None:
        opening = asyncio.ensure_future(world.stores.open_apart("t"))
        await asyncio.sleep(0)
        await world.creation.delete("t")
        await opening
        with pytest.raises(StoreNotFoundError):
            world.stores.get("t")

    run(go())
    store = create(world, run)
    assert world.stores.get("t") is store


def test_open_apart_when_the_table_is_damaged_then_the_error_comes_with_the_lookup(world: World, run: Loop) -> None:
    path = create(world, run).folder / FILE_NAME
    world.reopen()
    values = np.memmap(path, np.int64, "r+")
    values[-2] = -5
    values.flush()
    run(world.stores.open_apart("t"))
    for _ in range(2):
        with pytest.raises(CorruptDataError):
            world.stores.get("t")
    run(world.creation.delete("t"))
    assert world.stores.find("t") is None


def test_open_apart_when_a_table_is_small_then_no_thread_is_asked(world: World, run: Loop) -> None:
    create(world, run, LONG_ROWS - 1)
    world.reopen()
    assert not world.stores.is_long_to_open("t")
    assert run(turns_during(world.stores.open_apart("t"))) == 1


def test_stored_spec_when_of_a_replay_then_has_its_capacity_and_no_key_of_ours() -> None:
    replay = replace(RECORD, kind="replay", capacity=9)
    make_stored_spec = KINDS["replay"].make_stored_spec
    assert make_stored_spec(replay, SPEC).batch_size == (9, 4)
    taken = capture(TensorDict({"index": torch.zeros(4)}, [4])).spec
    with pytest.raises(InvalidSpecError, match="'index'"):
        make_stored_spec(replay, taken)
    assert KINDS["tensordict"].make_stored_spec(RECORD, taken) is taken
