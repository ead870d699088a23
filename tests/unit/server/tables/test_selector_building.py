from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tdserve.base.errors import DeadlineExceededError, StoreNotFoundError
from tdserve.rules.replay.eligibility.conditional_selectors import MAX_SELECTORS
from tdserve.rules.replay.eligibility.conditions import SampleConditions
from tdserve.rules.replay.samplers.order import Fifo
from tdserve.rules.replay.samplers.slices import Slices
from tdserve.server.kinds.table_kind import LONG_ROWS
from tdserve.server.open_store.opened_store import OpenedStore
from tdserve.server.tables.rule_keys import name_group_column
from tests.unit.server.replaying import content, create, extend, extending, in_line, path, rows, sample, sampling
from tests.unit.server.world import Loop, World, turns_during

GROUPED: dict[str, Any] = {"group_by": path("g"), "group_size": 2, "timeout_s": 20.0}


@pytest.fixture
def store(world: World, run: Loop) -> OpenedStore:
    """A full table of so many rows that its selectors are made in steps."""
    made = create(world, run, LONG_ROWS, sampler=Fifo())
    for start in range(0, LONG_ROWS, LONG_ROWS // 2):
        extend(world, run, made, rows(start, LONG_ROWS // 2), request=start + 1)
    return made


@pytest.mark.parametrize("fields", [{"consumer": "a", "timeout_s": 20.0}, GROUPED], ids=["consumer", "group"])
def test_sample_when_the_first_of_its_kind_then_others_are_served_and_it_has_all_rows(
    world: World, run: Loop, store: OpenedStore, fields: dict[str, Any]
) -> None:
    found: list[Any] = []

    async def take() -> None:
        found.append(await world.samples.sample(world.session(), 1, sampling(6, **fields)))

    assert run(turns_during(take())) > 8
    first = content(store, found[0])["a"]
    assert sorted(each // 2 for each in first) == sorted([each // 2 for each in first[::2]] * 2)
    assert not store.get_table().selectors.is_plain
    assert len(sample(world, run, store, 6, **fields)["a"]) == 6


def test_sample_when_rows_come_while_its_kind_is_learnt_then_they_are_among_them(
    world: World, run: Loop, store: OpenedStore
) -> None:
    async def scenario() -> Any:
        task = asyncio.create_task(world.samples.sample(world.session(), 1, sampling(6, **GROUPED)))
        for number in range(8):
            new = extending(store, rows(10 * LONG_ROWS + 4 * number, 4))
            await world.extends.extend(world.session(2), LONG_ROWS + number, new)
        return await task

    run(scenario())
    table, column = store.get_table(), name_group_column(("g",))
    conditions = SampleConditions(group=column, group_size=2)
    assert table.selectors.has(conditions)
    assert len(table.selectors.get(conditions)) == LONG_ROWS
    ids = table.columns.get_array(column, "int64")
    assert ids[:32].tolist() == [5 * LONG_ROWS + each // 2 for each in range(32)]
    assert ids[32:].tolist() == [each // 2 for each in range(32, LONG_ROWS)]


def test_sample_when_it_gives_up_meanwhile_then_the_next_finds_what_was_done(
    world: World, run: Loop, store: OpenedStore
) -> None:
    asked = sampling(6, consumer="a", timeout_s=1e-9)
    with pytest.raises(DeadlineExceededError, match="first sample of its kind"):
        run(world.samples.sample(world.session(), 1, asked))
    (task,) = (task for task in asyncio.all_tasks(run.loop) if task.get_name() == "tdserve-selector-building")
    assert len(sample(world, run, store, 6, consumer="a", timeout_s=20.0)["a"]) == 6
    assert task.done()


def test_sample_when_the_table_is_deleted_meanwhile_then_store_not_found(
    world: World, run: Loop, store: OpenedStore
) -> None:
    async def scenario() -> None:
        task = asyncio.create_task(world.samples.sample(world.session(), 1, sampling(6, consumer="a", timeout_s=20.0)))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        await world.creation.delete("r")
        with pytest.raises(StoreNotFoundError):
            await task

    run(scenario())


def test_sample_when_its_slices_are_of_a_new_length_then_others_are_served_and_rows_that_come_meanwhile_count(
    world: World, run: Loop
) -> None:
    made = create(world, run, LONG_ROWS, sampler=Slices(num_slices=2))
    extend(world, run, made, rows(0, 8))

    async def scenario() -> Any:
        task = asyncio.create_task(world.samples.sample(world.session(), 1, sampling(18, timeout_s=20.0)))
        for _ in range(3):
            await asyncio.sleep(0)
        assert made.view_lock.locked()
        await world.extends.extend(world.session(2), 1, extending(made, rows(100, 10)))
        assert not task.done()
        return await task

    found = content(made, run(scenario()))["a"]
    assert len(found) == 18
    assert all(part == list(range(part[0], part[0] + 9)) for part in (found[:9], found[9:]))
    assert min(found) >= 100


def test_sample_when_its_kind_is_forgotten_while_it_waits_then_it_is_learnt_again_a_few_rows_at_a_time(
    world: World, run: Loop
) -> None:
    made = create(world, run, LONG_ROWS, sampler=Fifo())
    extend(world, run, made, rows(0, LONG_ROWS // 2))
    selectors = made.get_table().selectors
    found: list[Any] = []

    async def take() -> None:
        asked = sampling(LONG_ROWS // 2 + 2, consumer="a", timeout_s=20.0)
        task = asyncio.create_task(world.samples.sample(world.session(), 1, asked))
        await in_line(made)
        forgotten = SampleConditions(consumer="a")
        assert selectors.has(forgotten)
        for number in range(MAX_SELECTORS):
            selectors.get(SampleConditions((), max_lag=number))
        await world.extends.extend(world.session(2), 1, extending(made, rows(LONG_ROWS, 2)))
        assert not selectors.has(forgotten)
        found.append(await task)

    run(take())
    assert content(made, found[0])["a"] == [*range(LONG_ROWS // 2), LONG_ROWS, LONG_ROWS + 1]
