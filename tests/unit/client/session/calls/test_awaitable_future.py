from __future__ import annotations

import asyncio
import concurrent.futures
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import pytest
import torch
from tensordict import TensorDict

import tdserve
from tdserve.client.session.calls.awaitable_future import AwaitableFuture

_Result = TypeVar("_Result")

TIMEOUT_S = 20.0
ROW = TensorDict({"x": torch.zeros(3)}, [])
ROWS = ROW.expand(4).clone()


def test_future_when_awaited_then_its_result_from_another_thread() -> None:
    async def scenario() -> int:
        future: AwaitableFuture[int] = AwaitableFuture()
        awaiting = asyncio.create_task(_wait(future))
        await asyncio.sleep(0)
        with ThreadPoolExecutor(1) as thread:
            thread.submit(future.run, lambda: 7)
        return await awaiting

    assert asyncio.run(scenario()) == 7


def test_future_when_converted_then_of_the_result_or_error_of_both() -> None:
    future: AwaitableFuture[int] = AwaitableFuture()
    converted, failing = future.convert(str), future.convert(lambda number: number // 0)
    future.run(lambda: 7)
    assert converted.result(TIMEOUT_S) == "7"
    with pytest.raises(ZeroDivisionError):
        failing.result(TIMEOUT_S)


def test_future_when_done_then_awaiting_it_does_not_yield() -> None:
    assert list(AwaitableFuture.make_done("x").__await__()) == []


def test_future_when_it_fails_then_every_task_that_awaits_it_gets_the_error() -> None:
    def fail() -> int:
        raise tdserve.ClosedError(what="it")

    async def scenario() -> list[Any]:
        future: AwaitableFuture[int] = AwaitableFuture()
        tasks = [asyncio.create_task(_wait(future)) for _ in range(3)]
        await asyncio.sleep(0)
        future.run(fail)
        return await asyncio.gather(*tasks, return_exceptions=True)

    assert [type(found) for found in asyncio.run(scenario())] == [tdserve.ClosedError] * 3


def test_future_when_cancelled_itself_then_the_task_that_awaits_it_is_not() -> None:
    async def scenario() -> str:
        future: AwaitableFuture[int] = AwaitableFuture()
        task = asyncio.create_task(_wait(future))
        await asyncio.sleep(0)
        assert future.cancel()
        future.run(lambda: 1)
        with pytest.raises(concurrent.futures.CancelledError):
            await task
        return "alive"

    assert asyncio.run(scenario()) == "alive"


def test_future_when_its_loop_has_ended_then_the_result_still_comes(caplog: pytest.LogCaptureFixture) -> None:
    future: AwaitableFuture[int] = AwaitableFuture()

    async def scenario() -> None:
        task = asyncio.create_task(_wait(future))
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])
        assert task.cancelled()
        assert not future.done()

    asyncio.run(scenario())
    future.run(lambda: 3)
    assert asyncio.run(_wait(future)) == 3  # another loop
    assert caplog.records == []


@pytest.mark.parametrize("kind", ["replay", "queue", "kv", "kv of one", "weights", "store", "priorities"])
def test_calls_when_they_return_early_then_their_futures_are_awaited(
    client: tdserve.Client, name: str, kind: str
) -> None:
    async def scenario() -> Any:
        if kind == "replay":
            table = client.create_replay(name, ROW, 16)
            assert (await table.extend(ROWS[:0], return_early=True)).tolist() == []
            first, last = await asyncio.gather(*[_wait(table.extend(ROWS, return_early=True)) for _ in range(2)])
            return sorted([*first.tolist(), *last.tolist()]) == list(range(8))
        if kind == "queue":
            return (await client.create_queue(name, ROW, 16).extend(ROWS, return_early=True)).tolist() == [0, 1, 2, 3]
        if kind == "kv":
            versions = await client.create_kv(name).put(["a", "b"], [1, 2], return_early=True)
            return versions == await client.create_kv(name, exists_ok=True).put([], [], return_early=True) + versions
        if kind == "kv of one":
            kv = client.create_kv(name)
            return await kv.put("a", 1, return_early=True) == kv.versions("a")
        if kind == "weights":
            return await client.publish(name, ROW, return_early=True) == 1
        if kind == "store":
            await client.init_remote(ROWS, name, return_early=True)
            await client[name].set_at_("x", torch.ones(3), 1, return_early=True)
            return (await client.from_remote_init(name, return_early=True))["x"].sum() == 3
        table = client.create_replay(name, ROW, 16, sampler=tdserve.Prioritized(alpha=1.0, beta=1.0))
        index = await table.extend(ROWS, return_early=True)
        return await table.update_priority(index, 2.0, return_early=True) == 0

    assert asyncio.run(asyncio.wait_for(scenario(), TIMEOUT_S))


def test_extend_when_the_task_that_awaits_it_is_cancelled_then_the_rows_are_stored(
    client: tdserve.Client, name: str
) -> None:
    queue = client.create_queue(name, ROW, 4)
    queue.extend(ROWS)  # full: the next extend waits

    async def scenario() -> None:
        future = queue.extend(ROWS, timeout_s=TIMEOUT_S, return_early=True)
        task = asyncio.create_task(_wait(future))
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])
        assert task.cancelled()
        assert not future.done()
        with queue.take(4):
            pass
        assert len(await future) == 4

    asyncio.run(asyncio.wait_for(scenario(), TIMEOUT_S))
    assert len(queue) == 4


async def _wait(future: AwaitableFuture[_Result]) -> _Result:
    return await future
