"""Samples of very many rows. They are drawn a few rows at a time, while other requests run."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from tdserve.base.errors import PeerLostError
from tdserve.messages.row_numbers import PIECE_ROWS, TREE_PIECE_ROWS
from tdserve.rules.replay.limiter import Queue
from tdserve.rules.replay.samplers.order import Fifo
from tdserve.rules.replay.samplers.prioritized import Prioritized
from tdserve.rules.replay.samplers.without_replacement import WithoutReplacement
from tdserve.server.open_store.opened_store import OpenedStore
from tdserve.v1 import control_pb2
from tests.unit.server.replaying import (
    content,
    create,
    extend,
    extending,
    in_line,
    numbers,
    path,
    rows,
    sample,
    sampling,
)
from tests.unit.server.world import Loop, World, turns_during

MANY = 4 * TREE_PIECE_ROWS + 5


def clearing() -> control_pb2.ChangeRequest:
    return control_pb2.ChangeRequest(store="r", clear=True)


def test_sample_when_it_is_of_very_many_rows_then_others_have_their_turns_and_all_count(
    world: World, run: Loop
) -> None:
    made = create(world, run, sampler=Prioritized())
    extend(world, run, made, rows(10, 6))
    found: list[Any] = []

    async def take() -> None:
        found.append(await world.samples.sample(world.session(1), 1, sampling(MANY)))

    assert run(turns_during(take())) > 4
    content_found = content(made, found[0])
    assert content_found["a"] == [10 + index for index in content_found["index"]]
    assert len(content_found["a"]) == MANY
    assert made.get_table().counts.samples == MANY
    assert int(made.get_table().columns.times_sampled.sum()) == MANY


def test_sample_when_all_rows_go_while_it_is_drawn_then_it_is_drawn_anew(world: World, run: Loop) -> None:
    made = create(world, run, sampler=Prioritized())
    extend(world, run, made, rows(10, 6))

    async def scenario() -> control_pb2.Done | None:
        sampling_many = asyncio.create_task(world.samples.sample(world.session(1), 1, sampling(MANY, timeout_s=20.0)))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        await world.changes.change(world.session(2), 1, clearing())
        await in_line(made)
        await world.extends.extend(world.session(2), 2, extending(made, rows(30, 2)))
        return await sampling_many

    found = content(made, run(scenario()))
    assert set(found["a"]) == {30, 31}
    assert len(found["a"]) == MANY
    assert made.get_table().counts.samples == MANY


def test_sample_when_cancelled_while_it_is_drawn_then_nothing_is_counted(world: World, run: Loop) -> None:
    made = create(world, run, sampler=Prioritized())
    extend(world, run, made, rows(10, 6))

    async def scenario() -> None:
        sampling_many = asyncio.create_task(world.samples.sample(world.session(1), 1, sampling(MANY)))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert 0 < made.get_table().columns.times_sampled.sum() < MANY
        assert made.get_table().counts.samples == MANY  # for the limiter it has them already
        sampling_many.cancel()
        await asyncio.wait({sampling_many})

    run(scenario())
    assert made.get_table().counts.samples == 0
    assert made.get_table().columns.times_sampled.sum() == 0


def test_release_when_very_many_rows_were_held_then_others_have_their_turns(world: World, run: Loop) -> None:
    num_rows = 3 * PIECE_ROWS
    made = create(world, run, num_rows, sampler=Fifo(), limiter=Queue(num_rows), is_queue=True)
    extend(world, run, made, rows(10, num_rows))
    for _ in range(6):
        run(world.samples.sample(world.session(1), 1, sampling(num_rows // 6, is_lease=True)))
    assert run(turns_during(world.samples.release(1))) > 4
    assert made.get_table().info()["num_leased"] == 0
    assert sample(world, run, made, 2, world.session(2), is_lease=True)["a"] == [10, 11]


@pytest.fixture
def long_queue(world: World, run: Loop) -> OpenedStore:
    """A queue of very many rows, full."""
    made = create(world, run, MANY, sampler=Fifo(), limiter=Queue(MANY), is_queue=True)
    extend(world, run, made, rows(10, MANY))
    return made


async def begin_taking(world: World, session: Any, num_rows: int, **fields: Any) -> asyncio.Task[Any]:
    """A sample on lease, of which the first rows are drawn."""
    asked = sampling(num_rows, is_lease=True, timeout_s=20.0, **fields)
    taking = asyncio.create_task(world.samples.sample(session, 1, asked))
    for _ in range(3):
        await asyncio.sleep(0)
    assert not taking.done()
    return taking


def test_take_when_it_is_of_very_many_rows_then_others_have_their_turns_and_each_row_is_leased_once(
    world: World, run: Loop, long_queue: OpenedStore
) -> None:
    async def scenario() -> tuple[Any, Any]:
        taking = await begin_taking(world, world.session(1), MANY - 3)
        assert 0 < long_queue.get_table().selectors.leases.num_leased < MANY - 3
        assert long_queue.get_table().counts.samples == MANY - 3
        other = await world.samples.sample(world.session(2), 1, sampling(3, is_lease=True, timeout_s=20.0))
        return await taking, other

    found, other = run(scenario())
    assert content(long_queue, found)["a"] == [*range(10, 7 + MANY)]
    assert content(long_queue, other)["a"] == [*range(7 + MANY, 10 + MANY)]
    run(world.samples.give_back(1, 1))
    assert long_queue.get_table().info()["num_leased"] == 3


@pytest.mark.parametrize("event", ["cancelled", "ended"])
def test_take_when_it_is_given_up_while_it_is_drawn_then_nothing_stays_on_lease(
    world: World, run: Loop, long_queue: OpenedStore, event: str
) -> None:
    session = world.session(1)

    async def scenario() -> None:
        taking = await begin_taking(world, session, MANY)
        if event == "cancelled":
            taking.cancel()
        else:
            session.ended.set()
            await world.samples.release(1)
        await asyncio.wait({taking})
        assert taking.cancelled() or isinstance(taking.exception(), PeerLostError)

    run(scenario())
    table = long_queue.get_table()
    assert (table.info()["num_leased"], table.counts.samples) == (0, 0)
    assert sample(world, run, long_queue, 2, world.session(2), is_lease=True)["a"] == [10, 11]


def test_take_when_too_many_rows_are_deleted_while_it_is_drawn_then_it_waits_for_others_and_holds_none(
    world: World, run: Loop, long_queue: OpenedStore
) -> None:
    async def scenario() -> Any:
        taking = await begin_taking(world, world.session(1), MANY)
        deleted = control_pb2.Rows(data=numbers(0, MANY - 1))
        await world.changes.change(world.session(2), 1, control_pb2.ChangeRequest(store="r", delete=deleted))
        await in_line(long_queue)
        assert long_queue.get_table().info()["num_leased"] == 0
        await world.extends.extend(world.session(2), 2, extending(long_queue, rows(0, 2)))
        return await taking

    found = content(long_queue, run(scenario()))
    assert found["a"] == [*range(11, 9 + MANY), 0, 1]


def test_sample_when_rows_that_come_once_leave_for_it_then_others_have_their_turns_and_all_leave(
    world: World, run: Loop
) -> None:
    made = create(world, run, MANY, sampler=WithoutReplacement(), max_times_sampled=1)
    extend(world, run, made, rows(0, MANY))
    found: list[Any] = []

    async def take() -> None:
        found.append(await world.samples.sample(world.session(1), 1, sampling(MANY - 2)))

    assert run(turns_during(take())) > 8
    drawn = content(made, found[0])["a"]
    assert len(set(drawn)) == len(drawn) == MANY - 2
    left = set(range(MANY)) - set(drawn)
    assert set(sample(world, run, made, 2)["a"]) == left


def test_sample_when_a_group_comes_again_while_it_is_drawn_then_no_row_is_in_it_twice(world: World, run: Loop) -> None:
    made = create(world, run, MANY)
    extend(world, run, made, rows(0, MANY - 1))
    fields: dict[str, Any] = {"group_by": path("g"), "group_size": 2, "timeout_s": 20.0}
    sample(world, run, made, 2, **fields)

    async def scenario() -> Any:
        asked = sampling(MANY - 1, **fields)
        sampling_many = asyncio.create_task(world.samples.sample(world.session(1), 1, asked))
        for _ in range(3):
            await asyncio.sleep(0)
        assert made.get_table().counts.samples == 2 + MANY - 1
        assert not sampling_many.done()
        made.get_table().selectors.suspend(np.arange(MANY - 1))
        made.get_table().selectors.enter(np.arange(MANY - 1))
        return await sampling_many

    found = content(made, run(scenario()))
    assert len(set(found["a"])) == MANY - 1
