"""Calls in threads, and what becomes of them when their task is cancelled."""

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
