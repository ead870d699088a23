from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from tdserve.base.errors import (
    DeadlineExceededError,
    EndOfStreamError,
    InvalidRequestError,
    KeyNotFoundError,
    PeerLostError,
    StoreNotFoundError,
    WrongStateError,
)
from tdserve.messages.content import make_rows_layout
from tdserve.rules.replay.limiter import Queue
from tdserve.rules.replay.samplers.order import Fifo
from tdserve.rules.replay.samplers.prioritized import Prioritized
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
from tests.unit.server.world import Loop, World, outside


@pytest.fixture
def store(world: World, run: Loop) -> OpenedStore:
    """A ring of eight rows, sampled oldest first, that has six."""
    made = create(world, run, sampler=Fifo())
    extend(world, run, made, rows(10, 6))
    return made


@pytest.fixture
def queue(world: World, run: Loop) -> OpenedStore:
    """A queue of four rows, full."""
    made = create(world, run, capacity=4, sampler=Fifo(), limiter=Queue(4), is_queue=True)
    extend(world, run, made, rows(10, 4))
    return made


def acknowledge(world: World, run: Loop, session: Any, request: int, *rows: int, consumer: str = "") -> None:
    """Says that rows are done with."""
    leased = control_pb2.Leased(rows=numbers(*rows), consumer=consumer)
    run(world.changes.change(session, request, control_pb2.ChangeRequest(store="r", acknowledge=leased)))


def test_sample_when_the_sampler_has_columns_then_they_come_along(world: World, run: Loop) -> None:
    made = create(world, run, sampler=Prioritized(alpha=1.0))
    extend(world, run, made, rows(10, 2))
    found = sample(world, run, made, 50)
    assert set(found) >= {"priority", "probability", "priority_weight", "times_sampled", "index", "generation"}
    assert set(found["priority"]) == {1.0}
    assert found["a"] == [10 + index for index in found["index"]]
    times = np.bincount(found["index"], minlength=8)
    assert times.tolist() == made.get_table().columns.times_sampled.tolist()


def test_sample_when_a_session_takes_then_no_other_session_until_it_ends(
    world: World, run: Loop, queue: OpenedStore
) -> None:
    assert sample(world, run, queue, 3, world.session(1), is_lease=True)["a"] == [10, 11, 12]
    assert sample(world, run, queue, 1, world.session(2), is_lease=True)["a"] == [13]
    with pytest.raises(DeadlineExceededError):
        sample(world, run, queue, 1, world.session(3), is_lease=True)
    run(world.samples.release(1))
    assert sample(world, run, queue, 3, world.session(3), is_lease=True)["a"] == [10, 11, 12]


def test_release_when_a_taker_waits_then_it_has_the_rows_at_once(world: World, run: Loop, queue: OpenedStore) -> None:
    sample(world, run, queue, 4, world.session(1), is_lease=True)

    async def scenario() -> control_pb2.Done | None:
        asked = sampling(2, is_lease=True, timeout_s=20.0)
        waiting = asyncio.create_task(world.samples.sample(world.session(2), 1, asked))
        await in_line(queue)
        await world.samples.release(1)
        return await waiting

    assert content(queue, run(scenario()))["a"] == [10, 11]


def test_release_when_it_held_nothing_then_no_call_is_woken(world: World, run: Loop, queue: OpenedStore) -> None:
    run(world.samples.release(7))
    assert queue.get_table().info()["num_leased"] == 0


def test_sample_when_sending_fails_then_what_it_took_is_there_again(
    world: World, run: Loop, queue: OpenedStore
) -> None:
    session = world.session(1)
    session.ended.set()
    with pytest.raises(PeerLostError):
        sample(world, run, queue, 3, session, is_lease=True)
    assert queue.get_table().info()["num_leased"] == 0
    assert queue.get_table().counts.samples == 0
    assert sample(world, run, queue, 4, is_lease=True)["a"] == [10, 11, 12, 13]


def test_sample_when_rows_may_be_had_once_then_they_go_after_they_were_sent(world: World, run: Loop) -> None:
    made = create(world, run, sampler=Fifo(), max_times_sampled=1)
    extend(world, run, made, rows(10, 4))
    session = world.session(1)
    session.ended.set()
    with pytest.raises(PeerLostError):
        sample(world, run, made, 2, session)
    table = made.get_table()
    assert (len(table), int(table.columns.times_sampled.sum())) == (4, 0)
    found = sample(world, run, made, 2)
    assert (found["a"], found["times_sampled"]) == ([10, 11], [1, 1])
    assert table.state.list_live_rows().tolist() == [2, 3]
    assert extend(world, run, made, rows(20, 2)) == [0, 1]


def test_sample_when_rows_were_used_up_then_a_writer_that_waits_goes_on(world: World, run: Loop) -> None:
    made = create(world, run, capacity=4, sampler=Fifo(), limiter=Queue(4), max_times_sampled=1)
    extend(world, run, made, rows(10, 4))

    async def scenario() -> None:
        writing = asyncio.create_task(
            world.extends.extend(world.session(2), 1, extending(made, rows(20, 2), timeout_s=20.0))
        )
        await in_line(made)
        await world.samples.sample(world.session(1), 1, sampling(2))
        await writing

    run(scenario())
    assert sample(world, run, made, 4)["a"] == [12, 13, 20, 21]


def test_sample_when_a_consumer_is_named_then_each_gets_each_row_once(
    world: World, run: Loop, store: OpenedStore
) -> None:
    session = world.session(1)
    for request, first in enumerate((10, 13), 2):
        for consumer in ("trainer", "critic"):
            found = sample(world, run, store, 3, session, consumer=consumer, is_lease=True)
            assert found["a"] == [first, first + 1, first + 2]
            number = 10 * request + (consumer == "critic")
            acknowledge(world, run, session, number, *found["index"], consumer=consumer)
    with pytest.raises(DeadlineExceededError, match="consumer 'trainer' has not had"):
        sample(world, run, store, 1, session, consumer="trainer", is_lease=True)
    assert len(store.get_table()) == 6


def test_sample_when_keys_are_required_then_only_rows_that_have_them(
    world: World, run: Loop, store: OpenedStore
) -> None:
    partial = rows(20, 2).select("a")
    assert extend(world, run, store, partial, request=2, keys=[path("a")]) == [6, 7]
    assert sample(world, run, store, 6)["a"] == [10, 11, 12, 13, 14, 15]
    with pytest.raises(DeadlineExceededError, match=r"are whole \('g' is missing in 2, "):
        sample(world, run, store, 7)
    assert sample(world, run, store, 8, require=[path("a")])["a"] == [*range(10, 16), 20, 21]
    assert sample(world, run, store, 8, accepts_partial=True)["a"] == [*range(10, 16), 20, 21]
    with pytest.raises(DeadlineExceededError, match="have all required keys"):
        sample(world, run, store, 7, require=[path("a"), path("n")])


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"require": [path("no")]}, KeyNotFoundError),
        ({"require": [path("n", "no")]}, KeyNotFoundError),
        ({"group_by": path("no"), "group_size": 2}, KeyNotFoundError),
        ({"group_by": path("g")}, InvalidRequestError),
        ({"group_by": path("g"), "group_size": 9}, InvalidRequestError),
        ({"group_by": path("g"), "group_size": 2, "num_rows": 3}, InvalidRequestError),
        ({"num_rows": 9}, InvalidRequestError),
        ({"num_rows": 0}, InvalidRequestError),
        ({"store": "no"}, StoreNotFoundError),
    ],
)
def test_sample_when_it_cannot_be_then_typed_error_and_nothing_is_counted(
    world: World, run: Loop, store: OpenedStore, fields: dict[str, Any], error: type[Exception]
) -> None:
    with pytest.raises(error):
        run(world.samples.sample(world.session(), 1, sampling(**{"num_rows": 2, "is_lease": True, **fields})))
    table = store.get_table()
    assert (table.counts.samples, table.info()["num_leased"]) == (0, 0)


def test_sample_when_grouped_then_whole_groups_side_by_side(world: World, run: Loop, store: OpenedStore) -> None:
    extend(world, run, store, rows(17, 1), request=2)  # the other one of its group does not come
    found = sample(world, run, store, 6, group_by=path("g"), group_size=2)
    pairs = list(zip(found["a"][::2], found["a"][1::2], strict=True))
    assert sorted(pairs) == [(10, 11), (12, 13), (14, 15)]
    with pytest.raises(DeadlineExceededError, match="whole groups of 2"):
        sample(world, run, store, 8, group_by=path("g"), group_size=2)


def test_sample_when_the_table_is_closed_then_drained_and_then_the_end(
    world: World, run: Loop, queue: OpenedStore
) -> None:
    session = world.session(1)
    run(world.changes.change(session, 2, control_pb2.ChangeRequest(store="r", close=True)))
    with pytest.raises(WrongStateError, match="closed"):
        extend(world, run, queue, rows(20, 1), request=3)
    assert sample(world, run, queue, 3, session, is_lease=True)["a"] == [10, 11, 12]
    assert sample(world, run, queue, 3, session, is_lease=True)["a"] == [13]

    async def scenario() -> None:
        waiting = asyncio.create_task(
            world.samples.sample(world.session(2), 1, sampling(1, is_lease=True, timeout_s=20.0))
        )
        await in_line(queue)
        leased = control_pb2.Leased(rows=numbers(0, 1, 2, 3))
        await world.changes.change(session, 3, control_pb2.ChangeRequest(store="r", acknowledge=leased))
        with pytest.raises(EndOfStreamError):
            await waiting

    run(scenario())


def test_sample_when_several_batches_cannot_be_had_then_one(world: World, run: Loop, queue: OpenedStore) -> None:
    found = sample(world, run, queue, 3, num_batches=2, is_lease=True)
    assert found["a"] == [10, 11, 12]


def test_sample_when_another_call_waits_first_then_one_that_posted_its_buffers_must_wait(
    world: World, run: Loop, queue: OpenedStore
) -> None:
    session = world.session(92)  # of its own: its void content finds no channel
    sizes = make_rows_layout(queue.spec, 1).message_nbytes

    async def scenario() -> control_pb2.Done | None:
        for _ in range(2):
            await world.samples.sample(world.session(1), 1, sampling(2, is_lease=True))
        waiting = asyncio.create_task(
            world.samples.sample(world.session(2), 1, sampling(1, is_lease=True, timeout_s=20.0))
        )
        await in_line(queue)
        list(queue.get_table().selectors.release_in_pieces(1))  # there are rows now, but no waiting call was woken yet
        answer = await world.samples.sample(session, 1, sampling(1, is_lease=True, message_nbytes=sizes))
        queue.waiters.wake()
        await waiting
        return answer

    assert run(scenario()) == control_pb2.Done(must_wait=True)
    assert queue.get_table().info()["num_leased"] == 1


def test_sample_when_given_up_while_it_waits_then_it_takes_nothing(world: World, run: Loop, queue: OpenedStore) -> None:
    sample(world, run, queue, 4, world.session(1), is_lease=True)

    async def scenario() -> None:
        waiting = asyncio.create_task(
            world.samples.sample(world.session(2), 1, sampling(2, is_lease=True, timeout_s=20.0))
        )
        await in_line(queue)

        def cancel() -> None:  # it is granted, and has not gone on yet
            assert queue.get_table().info()["num_leased"] == 2
            waiting.cancel()

        await world.samples.release(1)
        await outside(cancel)
        await asyncio.wait({waiting})
        assert waiting.cancelled()

    run(scenario())
    assert queue.get_table().info()["num_leased"] == 0
    assert queue.get_table().counts.samples == 4
    assert sample(world, run, queue, 4, is_lease=True)["a"] == [10, 11, 12, 13]
