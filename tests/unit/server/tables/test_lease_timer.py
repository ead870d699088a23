from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from typing import Any

import pytest

from tdserve.base.deadline import Deadline
from tdserve.base.errors import DeadlineExceededError, InvalidRequestError, WrongStateError
from tdserve.rules.replay.limiter import Queue
from tdserve.rules.replay.samplers.order import Fifo
from tdserve.server.open_store.opened_store import OpenedStore
from tdserve.v1 import control_pb2
from tests.unit.server.replaying import content, create, extend, in_line, numbers, rows, sample, sampling
from tests.unit.server.world import Loop, World

SHORT_S = 0.02
LONG_S = 1000.0


@pytest.fixture
def queue(world: World, run: Loop) -> OpenedStore:
    """A queue of four rows, full."""
    made = create(world, run, capacity=4, sampler=Fifo(), limiter=Queue(4), is_queue=True)
    extend(world, run, made, rows(10, 4))
    return made


def leased(*named: int, request: int = 1, consumer: str = "", lease_s: float = 0.0) -> control_pb2.Leased:
    """Rows of a lease."""
    return control_pb2.Leased(rows=numbers(*named), consumer=consumer, request=request, lease_s=lease_s)


async def change(world: World, session: int, request: int, **kind: Any) -> control_pb2.Done:
    """The answer to a change."""
    asked = control_pb2.ChangeRequest(store="r", **kind)
    return await world.changes.change(world.session(session), request, asked)


async def take(world: World, store: OpenedStore, num_rows: int, session: int, **fields: Any) -> list[int]:
    """Takes rows as soon as they are there; returns what ``a`` is in them."""
    asked = sampling(num_rows, **{"is_lease": True, "timeout_s": 20.0, **fields})
    found: list[int] = content(store, await world.samples.sample(world.session(session), 1, asked))["a"]
    return found


def is_ending() -> bool:
    """Whether a task gives rows back."""
    return any(task.get_name() == "tdserve-ending-leases" for task in asyncio.all_tasks())


async def wait_until(is_so: Callable[[], bool]) -> None:
    """Lets the event loop run until something is so."""
    deadline = Deadline.after(20.0)
    for _ in iter(lambda: deadline.expired, True):
        if is_so():
            return
        await asyncio.sleep(0)
    raise AssertionError("it is still not so")


async def wait_for_ending() -> None:
    """Lets the event loop run until a task gives rows back; it may wait for the store's lock."""
    await wait_until(is_ending)


def test_take_when_the_lease_of_another_is_over_then_it_has_the_rows_in_their_order(
    world: World, run: Loop, queue: OpenedStore
) -> None:
    sample(world, run, queue, 1, world.session(3), is_lease=True)  # without an end
    sample(world, run, queue, 3, world.session(1), is_lease=True, lease_s=SHORT_S)
    assert run(take(world, queue, 3, 2)) == [11, 12, 13]
    assert queue.get_table().info()["num_leased"] == 4


def test_take_when_leases_end_at_different_times_then_each_comes_back_at_its_own(
    world: World, run: Loop, queue: OpenedStore
) -> None:
    for session, lease_s in ((1, 3 * SHORT_S), (2, LONG_S), (3, SHORT_S)):
        sample(world, run, queue, 1, world.session(session), is_lease=True, lease_s=lease_s)
    assert sorted(run(take(world, queue, 3, 4))) == [10, 12, 13]
    with pytest.raises(DeadlineExceededError):
        run(take(world, queue, 1, 5, timeout_s=0.0))


@pytest.mark.parametrize("request_number", [0, 1])
def test_acknowledge_when_the_lease_is_over_then_refused_by_its_reason_and_the_next_holder_goes_on(
    world: World, run: Loop, queue: OpenedStore, request_number: int
) -> None:
    sample(world, run, queue, 4, world.session(1), is_lease=True, lease_s=SHORT_S)
    assert run(take(world, queue, 4, 2)) == [10, 11, 12, 13]
    with pytest.raises(WrongStateError, match=r"lease has ended.*lease_s"):
        run(change(world, 1, 5, acknowledge=leased(0, 1, request=request_number)))
    run(change(world, 2, 6, acknowledge=leased(0, 1)))
    assert queue.get_table().state.list_live_rows().tolist() == [2, 3]
    with pytest.raises(WrongStateError):
        run(change(world, 1, 7, acknowledge=leased(0, 1, request=request_number)))


def test_acknowledge_when_it_has_begun_before_the_lease_is_over_then_it_counts(
    world: World, run: Loop, queue: OpenedStore
) -> None:
    async def scenario() -> None:
        async with queue.write_lock:
            acknowledging = asyncio.create_task(change(world, 1, 5, acknowledge=leased(0, 1)))
            await asyncio.sleep(0)  # it waits for the lock, in which it looks for the rows
            await take(world, queue, 2, 1, lease_s=SHORT_S)
            await wait_for_ending()
        assert (await acknowledging).num_rows == 2

    run(scenario())
    assert run(take(world, queue, 2, 2)) == [12, 13]


def test_acknowledge_when_it_comes_while_rows_are_given_back_then_refused(
    world: World, run: Loop, queue: OpenedStore
) -> None:
    async def scenario() -> None:
        async with queue.write_lock:
            await take(world, queue, 2, 1, lease_s=SHORT_S)
            await wait_for_ending()
            acknowledging = asyncio.create_task(change(world, 1, 5, acknowledge=leased(0, 1)))
            await asyncio.sleep(0)
        with pytest.raises(WrongStateError, match="neither acknowledged nor renewed within its lease_s"):
            await acknowledging

    run(scenario())
    assert run(take(world, queue, 4, 2)) == [10, 11, 12, 13]


def test_renew_when_it_has_begun_before_the_lease_is_over_then_all_its_rows_stay_until_the_new_end(
    world: World, run: Loop, queue: OpenedStore
) -> None:
    async def scenario() -> None:
        async with queue.write_lock:
            renewing = asyncio.create_task(change(world, 1, 5, renew=leased(0, lease_s=LONG_S)))
            await asyncio.sleep(0)
            await take(world, queue, 2, 1, lease_s=SHORT_S)
            await wait_for_ending()
        assert (await renewing).num_rows == 1  # and the other row with it
        await wait_until(lambda: not is_ending())

    run(scenario())
    assert run(take(world, queue, 2, 2)) == [12, 13]
    run(change(world, 1, 6, renew=leased(0, 1, lease_s=SHORT_S)))  # sooner
    assert run(take(world, queue, 2, 3)) == [10, 11]


def test_renew_when_the_lease_had_no_end_then_it_has_one(world: World, run: Loop, queue: OpenedStore) -> None:
    sample(world, run, queue, 4, world.session(1), is_lease=True)
    run(change(world, 1, 5, renew=leased(0, request=0, lease_s=SHORT_S)))
    assert run(take(world, queue, 4, 2)) == [10, 11, 12, 13]


def test_renew_when_the_lease_is_over_then_refused_by_its_reason(world: World, run: Loop, queue: OpenedStore) -> None:
    sample(world, run, queue, 4, world.session(1), is_lease=True, lease_s=SHORT_S)
    run(take(world, queue, 4, 2, lease_s=LONG_S))
    with pytest.raises(WrongStateError, match="neither acknowledged nor renewed") as caught:
        run(change(world, 1, 5, renew=leased(0, 1, lease_s=LONG_S)))
    assert caught.value.fields["event"] == "renewing the lease of rows"


@pytest.mark.parametrize("lease_s", [-1.0, math.nan, math.inf])
def test_take_when_the_time_is_none_then_refused(world: World, run: Loop, queue: OpenedStore, lease_s: float) -> None:
    for fields in ({"is_lease": True, "lease_s": lease_s}, {"lease_s": 1.0}):
        with pytest.raises(InvalidRequestError) as caught:
            sample(world, run, queue, 1, world.session(1), **fields)
        assert caught.value.fields["argument"] == "lease_s"
    sample(world, run, queue, 1, world.session(1), is_lease=True)
    for value in (lease_s, 0.0):
        with pytest.raises(InvalidRequestError):
            run(change(world, 1, 5, renew=leased(0, lease_s=value)))


def test_take_when_a_consumer_has_a_name_then_its_lease_ends_for_it_alone(world: World, run: Loop) -> None:
    table = create(world, run, sampler=Fifo(), limiter=Queue(8), consumers=("judge", "trainer"))
    extend(world, run, table, rows(10, 2))
    sample(world, run, table, 2, world.session(1), is_lease=True, consumer="judge", lease_s=SHORT_S)
    sample(world, run, table, 2, world.session(2), is_lease=True, consumer="trainer")
    assert run(take(world, table, 2, 3, consumer="judge")) == [10, 11]
    with pytest.raises(WrongStateError):
        run(change(world, 1, 5, acknowledge=leased(0, 1, consumer="judge")))
    run(change(world, 2, 6, acknowledge=leased(0, 1, consumer="trainer")))
    assert table.get_table().info()["num_leased"] == 2


def test_timer_when_the_store_is_at_rest_then_the_rows_are_there_when_it_serves_again(
    world: World, run: Loop, queue: OpenedStore
) -> None:
    async def scenario() -> list[int]:
        async with queue.write_lock:
            await take(world, queue, 3, 1, lease_s=SHORT_S)
            queue.waiters.begin_seal("r")
            queue.waiters.begin_rest()
            await wait_for_ending()
        await wait_until(lambda: not is_ending())
        queue.waiters.end_seal()
        return await take(world, queue, 4, 2)

    assert run(scenario()) == [10, 11, 12, 13]


def test_timer_when_a_store_was_deleted_then_the_others_go_on(world: World, run: Loop, queue: OpenedStore) -> None:
    sample(world, run, queue, 1, world.session(1), is_lease=True, lease_s=SHORT_S)
    run(world.creation.delete("r"))
    made = create(world, run, capacity=4, sampler=Fifo(), limiter=Queue(4), is_queue=True)
    extend(world, run, made, rows(20, 1), request=2)
    sample(world, run, made, 1, world.session(1), is_lease=True, lease_s=2 * SHORT_S)
    assert run(take(world, made, 1, 2)) == [20]


def test_timer_when_closed_then_nothing_is_under_way(world: World, run: Loop, queue: OpenedStore) -> None:
    async def scenario() -> None:
        async with queue.write_lock:
            await take(world, queue, 2, 1, lease_s=SHORT_S)
            await wait_for_ending()
            world.services.lease_timer.close()
            await asyncio.sleep(0)
        await wait_until(lambda: not is_ending())

    run(scenario())
    assert queue.get_table().info()["num_leased"] == 2


def test_release_when_a_session_with_limited_leases_ends_then_at_once_and_the_timer_finds_nothing(
    world: World, run: Loop, queue: OpenedStore
) -> None:
    async def scenario() -> list[int]:
        waiting = asyncio.create_task(take(world, queue, 4, 2))
        await in_line(queue)
        await world.samples.release(1)
        return await waiting

    sample(world, run, queue, 3, world.session(1), is_lease=True, lease_s=LONG_S)
    assert run(scenario()) == [10, 11, 12, 13]
    assert math.isinf(queue.get_table().selectors.leases.next_end_s)
