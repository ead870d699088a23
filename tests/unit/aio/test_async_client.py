from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import pytest
import torch
from tensordict import TensorDict

import tdserve
from tdserve import aio
from tdserve.aio.async_objects import AsyncObject
from tdserve.client.datasets.epoch_batches import EpochBatches
from tdserve.client.handles.view import StoreView
from tdserve.client.session.session_client import SessionClient
from tests.processes import wait_for
from tests.roots import make_quick_root

TIMEOUT_S = 30.0
NUM_TICKS = 50
"""Turns of a task beside a call that waits: a loop that is blocked takes none."""

ROW = TensorDict({"x": torch.zeros(3)}, [])
ROWS = TensorDict({"x": torch.arange(12.0).reshape(4, 3)}, [4])

WRAPPED: dict[type[AsyncObject], type] = {
    aio.AsyncClient: tdserve.Client,
    aio.AsyncStoreHandle: tdserve.StoreHandle,
    aio.AsyncStoreView: StoreView,
    aio.AsyncReplayHandle: tdserve.ReplayHandle,
    aio.AsyncQueueHandle: tdserve.QueueHandle,
    aio.AsyncKeyedHandle: tdserve.KeyedHandle,
    aio.AsyncGroup: tdserve.Group,
    aio.AsyncSubscription: tdserve.Subscription,
    aio.AsyncReplayWriter: tdserve.ReplayWriter,
    aio.AsyncTaken: tdserve.Taken,
    aio.AsyncTakenBatches: tdserve.TakenBatches,
    aio.AsyncBatches: tdserve.Batches,
    aio.AsyncEpochBatches: EpochBatches,
}

OPENINGS = {"items", "values", "take", "batches", "writer", "subscribe", "group", "lock_", "unlock_"}
"""Methods that return an ``OpeningCall``, which is a coroutine and more."""

QUESTIONS = {"is_locked", "saved_path"}
"""Properties that ask the server."""


@pytest.fixture(scope="module")
def server() -> Iterator[tdserve.Server]:
    with make_quick_root() as root, tdserve.Server(root, grace_s=1.0) as started:
        yield started


Run = Callable[[Callable[[aio.AsyncClient], Coroutine[Any, Any, None]]], None]


@pytest.fixture(params=["shm", "gloo"])
def run(server: tdserve.Server, request: pytest.FixtureRequest) -> Run:
    """Runs a scenario with a client over either transport."""

    async def connect_and_run(scenario: Callable[[aio.AsyncClient], Coroutine[Any, Any, None]]) -> None:
        async with aio.connect(server.address, transport=request.param, timeout_s=TIMEOUT_S) as client:
            await asyncio.wait_for(scenario(client), 2 * TIMEOUT_S)
            for name in await client.stores():
                await client.delete(name)

    return lambda scenario: asyncio.run(connect_and_run(scenario))


@pytest.mark.parametrize(("kind", "wrapped"), WRAPPED.items(), ids=lambda kind: kind.__name__)
def test_methods_when_listed_then_each_is_a_coroutine_function(kind: type, wrapped: type) -> None:
    hidden = {*dir(SessionClient)} - {"close"} if wrapped is tdserve.Client else set()
    names = {name for name in dir(wrapped) if not name.startswith("_")} - hidden
    assert names
    for name in names:
        is_property = isinstance(inspect.getattr_static(wrapped, name), property)
        made = inspect.getattr_static(kind, name)
        if is_property and name not in QUESTIONS | {"is_locked"}:
            assert isinstance(made, property), name
        elif name in OPENINGS:
            assert inspect.signature(made) == inspect.signature(getattr(wrapped, name)), name
            assert inspect.isfunction(made), name
        elif not is_property or kind is aio.AsyncStoreHandle:
            assert inspect.iscoroutinefunction(made), name


async def wait_until_waiting(client: aio.AsyncClient, name: str) -> None:
    while not (await client.describe(name)).num_waiting:
        pass


async def tick(task: asyncio.Future[Any]) -> None:
    """Ends after turns of the loop in all of which a task was waiting."""
    for _ in range(NUM_TICKS):
        await asyncio.sleep(0)
        assert not task.done()


def test_take_when_it_waits_then_other_tasks_go_on(run: Run) -> None:
    async def scenario(client: aio.AsyncClient) -> None:
        queue = await client.create_queue("q", ROW, 8)
        taking = asyncio.create_task(queue.take(4, timeout_s=TIMEOUT_S))
        await wait_until_waiting(client, "q")
        await tick(taking)
        await queue.extend(ROWS)
        async with await taking as rows:
            assert rows["x"].equal(ROWS["x"])
        with pytest.raises(tdserve.DeadlineExceededError):
            await queue.take(4, timeout_s=0)

    run(scenario)


def test_entries_when_a_store_is_used_as_a_mapping_then_as_without_asyncio(run: Run) -> None:
    async def scenario(client: aio.AsyncClient) -> None:
        kv = await client.create_kv("kv")
        await kv.update({str(number): number for number in range(100)}, a="b")
        assert {key: value async for key, value in kv.items()} == {**{str(n): n for n in range(100)}, "a": "b"}
        assert [value async for value in kv.values(prefix="9")] == [9, *range(90, 100)]
        async with kv.values("a") as values:
            assert [value async for value in values] == ["b"]
        assert (await kv.setdefault("a", 1), await kv.setdefault("c", 1), await kv.pop("x", None)) == ("b", 1, None)
        assert await kv.get("x", default=5) == 5
        await kv.clear()
        assert await kv.keys() == []

    run(scenario)


def test_get_when_it_waits_then_other_tasks_go_on(run: Run) -> None:
    async def scenario(client: aio.AsyncClient) -> None:
        kv = await client.create_kv("kv")
        getting = asyncio.create_task(kv.get("a", timeout_s=TIMEOUT_S))
        await wait_until_waiting(client, "kv")
        await tick(getting)
        await kv.put("a", {"n": 7})
        assert await getting == {"n": 7}

    run(scenario)


def test_replay_when_used_then_as_the_synchronous_one(run: Run) -> None:
    async def scenario(client: aio.AsyncClient) -> None:
        replay = await client.create_replay("r", ROW, 64, sampler=tdserve.Prioritized(alpha=1.0, beta=1.0))
        assert (replay.name, replay.capacity) == ("r", 64)
        assert (await replay.extend(ROWS, return_early=True)).tolist() == [0, 1, 2, 3]
        async with replay.writer(batch=2) as writer:
            for at in range(4):
                await writer.append(ROWS[at])
            await writer.flush()
            assert writer.num_acknowledged == 4
        sample = await replay.sample(4)
        assert await replay.update_priority(sample, torch.ones(4)) == 0
        assert (await replay[2:4])["x"].equal(ROWS["x"][2:])
        assert [row["x"].tolist() async for row in replay] == 2 * ROWS["x"].tolist()
        async with replay.batches(3) as batches:
            assert len(await anext(batches)) == 3
        assert isinstance(await client["r"], aio.AsyncReplayHandle)
        assert [name async for name in client] == ["r"]
        assert await replay.delete(sample) == len(set(sample["index"].tolist()))
        assert await replay.delete(sample["index"], generation=sample["generation"]) == 0

    run(scenario)


def test_batch_size_when_the_store_was_replaced_then_of_what_was_read_last_without_asking(run: Run) -> None:
    async def scenario(client: aio.AsyncClient) -> None:
        store = await client.memmap(ROWS, "s")
        await client.delete("s")
        assert store.batch_size == (4,)  # to ask would hold up the event loop
        await client.memmap(ROWS[:2], "s")
        assert await store.refresh()
        assert store.batch_size == (2,)

    run(scenario)


def test_store_when_used_then_as_the_synchronous_one(run: Run) -> None:
    async def scenario(client: aio.AsyncClient) -> None:
        store = await client.memmap(ROWS, "s", return_early=True)
        assert isinstance(store, aio.AsyncStoreHandle)
        await store.set_at_("x", torch.ones(3), 1)
        view = await store.select("x")
        assert (await view.get_at("x", 1)).tolist() == [1.0] * 3
        assert (await store.mean(0))["x"].shape == (3,)  # a method of tensordict that the handle does not define
        assert store.batch_size == store.shape == (4,)
        parts = await store.split(2)
        assert [type(part) for part in parts] == [aio.AsyncStoreView] * 2
        assert [len(batch) async for batch in store.batches(3)] == [3, 1]
        async with store.lock_():
            assert await store.is_locked()
        assert not await store.is_locked()
        with pytest.raises(AttributeError, match="no_such_name"):
            store.no_such_name  # noqa: B018 (the access raises)

    run(scenario)


def test_weights_when_followed_then_each_version_is_awaited(run: Run) -> None:
    async def scenario(client: aio.AsyncClient) -> None:
        waiting = asyncio.create_task(client.wait_newer("w", newer_than=1, timeout_s=TIMEOUT_S))
        assert await client.publish("w", ROWS) == 1
        assert await client.publish("w", ROWS, return_early=True) == 2
        assert await waiting == 2
        async for weights in client.subscribe("w"):
            assert weights.version == 2
            break
        async with client.subscribe("w", newer_than=2) as subscription:
            following = asyncio.create_task(anext(subscription))
            await wait_until_waiting(client, "w")
            await client.publish("w", ROWS)
            assert (await following).version == 3
            ending = asyncio.create_task(anext(subscription, "the end"))
            await wait_until_waiting(client, "w")
            await subscription.close()
            assert await ending == "the end"

    run(scenario)


def test_take_when_cancelled_then_the_rows_that_it_takes_are_given_back(run: Run) -> None:
    async def scenario(client: aio.AsyncClient) -> None:
        queue = await client.create_queue("q", ROW, 8)
        taking = asyncio.create_task(queue.take(4, timeout_s=TIMEOUT_S))
        await wait_until_waiting(client, "q")
        taking.cancel()
        await asyncio.wait([taking])
        assert taking.cancelled()
        await queue.extend(ROWS)
        async with queue.take(4, timeout_s=TIMEOUT_S) as rows:
            assert rows["x"].equal(ROWS["x"])

    run(scenario)


def test_block_when_it_is_cancelled_then_its_rows_are_given_back(run: Run) -> None:
    async def scenario(client: aio.AsyncClient) -> None:
        queue = await client.create_queue("q", ROW, 8)
        await queue.extend(ROWS)
        has_taken = asyncio.Event()

        async def consume() -> None:
            async with queue.take(4):
                has_taken.set()
                await asyncio.Event().wait()

        consuming = asyncio.create_task(consume())
        await has_taken.wait()
        consuming.cancel()
        await asyncio.wait([consuming])
        assert consuming.cancelled()
        async with queue.take(4, timeout_s=0) as rows:
            assert len(rows) == 4

    run(scenario)


@pytest.mark.parametrize("goes_on", [True, False])
def test_step_when_cancelled_then_its_batch_comes_next_or_is_given_back(run: Run, goes_on: bool) -> None:
    async def scenario(client: aio.AsyncClient) -> None:
        queue = await client.create_queue("q", ROW, 8)
        async with queue.batches(4, timeout_s=TIMEOUT_S) as batches:
            step = asyncio.create_task(anext(batches))
            await wait_until_waiting(client, "q")
            step.cancel()
            await asyncio.wait([step])
            await queue.extend(ROWS)
            if goes_on:
                assert (await anext(batches))["x"].equal(ROWS["x"])
            else:
                while not (await queue.info())["num_leased"]:
                    pass
        info = await queue.info()
        assert (info["num_rows"], info["num_leased"]) == ((0, 0) if goes_on else (4, 0))

    run(scenario)


@pytest.mark.parametrize("transport", ["shm", "gloo"])
@pytest.mark.parametrize("waiting", ["take", "extend", "get"])
def test_calls_when_cancelled_while_they_wait_then_their_threads_are_free_for_others(
    server: tdserve.Server, waiting: str, transport: str
) -> None:
    async def scenario() -> None:
        client = aio.AsyncClient(server.client(transport=transport, timeout_s=TIMEOUT_S), max_threads=2)
        queue = await client.create_queue("awaited", ROW, 4)
        kv = await client.create_kv("awaited-keys")
        if waiting == "extend":
            await queue.extend(ROWS)
        calls: dict[str, Callable[[], Any]] = {
            "take": lambda: queue.take(4, timeout_s=1e6),
            "extend": lambda: queue.extend(ROWS, timeout_s=1e6),
            "get": lambda: kv.get("absent", timeout_s=1e6),
        }
        with server.client(timeout_s=TIMEOUT_S) as other:
            name = "awaited-keys" if waiting == "get" else "awaited"
            tasks = [asyncio.ensure_future(calls[waiting]()) for _ in range(6)]
            await asyncio.to_thread(wait_for, lambda: other.describe(name).num_waiting == 2, "calls that wait")
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
            assert {"awaited", "awaited-keys"} <= set(await client.stores())  # a thread is free
            await asyncio.to_thread(wait_for, lambda: other.describe(name).num_waiting == 0, "the end of these calls")
        assert (await queue.info())["inserts"] == (4 if waiting == "extend" else 0)
        await client.delete("awaited")
        await client.delete("awaited-keys")
        await client.close()

    asyncio.run(asyncio.wait_for(scenario(), 2 * TIMEOUT_S))


def test_call_when_it_waits_for_a_thread_then_its_timeout_goes_by(server: tdserve.Server) -> None:
    async def scenario() -> None:
        client = aio.AsyncClient(server.client(timeout_s=TIMEOUT_S), max_threads=1)
        queue = await client.create_queue("few", ROW, 4)
        with server.client(timeout_s=TIMEOUT_S) as other:
            first = asyncio.ensure_future(queue.take(4, timeout_s=TIMEOUT_S))
            await asyncio.to_thread(wait_for, lambda: other.describe("few").num_waiting, "a take")
            second = asyncio.ensure_future(queue.take(4, timeout_s=0.2))
            await asyncio.wait([second], timeout=0.3)
            other.queue("few").extend(ROWS)
            async with await first:
                with pytest.raises(tdserve.DeadlineExceededError) as caught:
                    await second
            assert caught.value.timeout_s == 0.2  # its own, not 0, for which it would ask once
            other.delete("few")
        await client.close()

    asyncio.run(asyncio.wait_for(scenario(), 2 * TIMEOUT_S))


def test_client_when_its_threads_are_busy_then_calls_wait_and_close_does_not(server: tdserve.Server) -> None:
    async def scenario() -> None:
        client = aio.AsyncClient(server.client(timeout_s=TIMEOUT_S), max_threads=1)
        with server.client(timeout_s=TIMEOUT_S) as other:
            queue = await client.create_queue("busy", ROW, 16)
            taking = asyncio.create_task(queue.take(8, timeout_s=TIMEOUT_S))
            await asyncio.to_thread(wait_for, lambda: other.describe("busy").num_waiting, "a take")
            dropped, extending = [asyncio.create_task(queue.extend(ROWS)) for _ in range(2)]
            await asyncio.sleep(0)
            dropped.cancel()
            await asyncio.wait([dropped])
            other.queue("busy").extend(ROWS)
            other.queue("busy").extend(ROWS)
            async with await taking:
                await extending  # once the thread was free
            assert (await queue.info())["inserts"] == 12  # not 16: the call that was cancelled had not begun
            blocked = asyncio.create_task(queue.take(16, timeout_s=TIMEOUT_S))
            await asyncio.to_thread(wait_for, lambda: other.describe("busy").num_waiting, "a take")
            await client.close()
            with pytest.raises(tdserve.ClosedError):
                await blocked
            with pytest.raises(tdserve.ClosedError):
                await client.stores()
            await client.close()
            other.delete("busy")

    asyncio.run(asyncio.wait_for(scenario(), TIMEOUT_S))


def test_connect_when_there_is_no_server_then_connect_error_and_when_awaited_then_a_client(
    server: tdserve.Server,
) -> None:
    async def scenario() -> None:
        with pytest.raises(tdserve.ConnectError):
            await tdserve.aio.connect("127.0.0.1:1", timeout_s=0.2)
        client = await tdserve.aio.connect(server.address)
        assert client.address == server.address
        await client.close()
        assert client.is_closed

    asyncio.run(scenario())


def test_group_when_two_join_then_they_exchange(run: Run) -> None:
    async def scenario(client: aio.AsyncClient) -> None:
        async with aio.connect(client.address) as other:
            groups = await asyncio.gather(client.group("g", 2, 0), other.group("g", 2, 1))
            sent, received = await asyncio.gather(groups[0].init_remote(ROWS, 1), groups[1].from_remote_init(0))
            assert sent is None
            assert received["x"].equal(ROWS["x"])
            await asyncio.gather(*[group.close() for group in groups])

    run(scenario)
