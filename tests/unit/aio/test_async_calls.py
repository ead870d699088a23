"""Calls in threads, and their end when their task is cancelled."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from threading import Event

import pytest
import torch
from tensordict import TensorDict

import tdserve
from tdserve.aio.async_calls import Calls
from tdserve.aio.async_handles import AsyncTaken
from tdserve.client.session.calls.call_deadline import get_call_deadline
from tests.processes import wait_for
from tests.roots import make_quick_root

TIMEOUT_S = 30.0
ROWS = TensorDict({"x": torch.arange(4)}, [4])


@pytest.fixture(scope="module")
def server() -> Iterator[tdserve.Server]:
    with make_quick_root() as root, tdserve.Server(root, grace_s=1.0) as started:
        yield started


async def cancel_while_it_ends(task: asyncio.Task[object], release: Callable[[], None]) -> None:
    """Cancels a task twice that waits for its end, and lets this go on; the task must have waited for it."""
    for _ in range(2):
        task.cancel()
        await asyncio.sleep(0)
        assert not task.done()
    release()
    await asyncio.wait([task], timeout=TIMEOUT_S)
    assert task.cancelled()


def test_end_when_its_task_is_cancelled_before_it_has_a_thread_then_it_is_carried_out() -> None:
    async def scenario() -> None:
        calls, busy, ended = Calls(1), Event(), []
        calls.start(lambda: busy.wait(TIMEOUT_S), is_end=True)
        ending = asyncio.create_task(calls.run(lambda: ended.append(True), is_end=True))
        await asyncio.sleep(0)
        await cancel_while_it_ends(ending, busy.set)
        assert ended == [True]
        calls.shut_down()

    asyncio.run(scenario())


@pytest.mark.parametrize("fails", [True, False])
def test_end_when_its_task_is_cancelled_while_it_runs_then_after_it(fails: bool) -> None:
    async def scenario() -> None:
        calls, busy, ended = Calls(1), Event(), []

        def end() -> None:
            busy.wait(TIMEOUT_S)
            ended.append(True)
            if fails:
                raise tdserve.WrongStateError(state="ended", event="ending")

        ending = asyncio.create_task(calls.run(end, is_end=True))
        await asyncio.sleep(0)
        await cancel_while_it_ends(ending, busy.set)
        assert ended == [True]
        calls.shut_down()

    asyncio.run(scenario())


def test_end_when_it_fails_then_its_error_is_raised() -> None:
    async def scenario() -> None:
        calls = Calls(1)

        def end() -> None:
            raise tdserve.WrongStateError(state="ended", event="ending")

        with pytest.raises(tdserve.WrongStateError):
            await calls.run(end, is_end=True)
        calls.shut_down()

    asyncio.run(scenario())


def test_calls_when_within_a_block_then_they_end_by_its_time(server: tdserve.Server) -> None:
    async def scenario(address: str) -> None:
        async with tdserve.aio.connect(address, timeout_s=TIMEOUT_S) as client:
            queue = await client.create_queue("block", ROWS[0], 8)
            batches = await queue.batches(4, timeout_s=TIMEOUT_S)
            versions = await client.subscribe("absent", timeout_s=TIMEOUT_S)
            async with queue.writer(timeout_s=TIMEOUT_S) as writer:
                for _ in range(8):
                    await writer.append(ROWS[0])
                await writer.flush()
                await writer.append(ROWS[0])
                with tdserve.within(0.1):
                    waits = [client.replay("absent"), writer.flush(), queue.extend(ROWS)]
                    for error in await asyncio.gather(*waits, return_exceptions=True):
                        assert isinstance(error, tdserve.DeadlineExceededError)
                        assert error.timeout_s == pytest.approx(0.1, abs=0.1)
                await batches.__anext__()
                await batches.__anext__()
                await writer.flush()  # the client's default
                with tdserve.within(0.1), pytest.raises(tdserve.DeadlineExceededError):
                    await batches.__anext__()
                with tdserve.within(0.1), pytest.raises(tdserve.DeadlineExceededError):
                    await versions.__anext__()
            await batches.close()
            await client.delete("block")

    with server.client() as client:
        asyncio.run(scenario(client.address))


def test_calls_when_all_threads_are_busy_then_a_block_covers_the_wait_for_one() -> None:
    async def scenario() -> None:
        calls, busy = Calls(1), Event()
        calls.start(lambda: busy.wait(TIMEOUT_S))
        with tdserve.within(0.0):
            waiting = asyncio.create_task(calls.run(get_call_deadline))
            await asyncio.sleep(0)
            busy.set()
            assert (await waiting).expired
        assert await calls.run(get_call_deadline) is None
        calls.shut_down()

    asyncio.run(scenario())


def test_block_when_it_is_cancelled_at_its_end_then_its_rows_are_acknowledged(server: tdserve.Server) -> None:
    async def scenario(queue: tdserve.QueueHandle) -> None:
        calls, busy, is_over = Calls(1), Event(), asyncio.Event()
        calls.start(lambda: busy.wait(TIMEOUT_S), is_end=True)

        async def consume() -> None:
            async with AsyncTaken(queue.take(4), calls):
                is_over.set()

        consuming = asyncio.create_task(consume())
        await is_over.wait()
        await cancel_while_it_ends(consuming, busy.set)
        calls.shut_down()

    with server.client(timeout_s=TIMEOUT_S) as client:
        queue = client.create_queue("ends", ROWS[0], 8)
        queue.extend(ROWS)
        asyncio.run(scenario(queue))
        wait_for(lambda: queue.info()["num_rows"] == 0, "the acknowledgement")
        client.delete("ends")
