"""The end of a lease takes no longer than the client's timeout while the server stands still."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from typing import Any

import pytest
import torch
from tensordict import TensorDict

import tdserve
from tdserve.client.tables.draws import batches, taking
from tests.integration.crashing import Crashing
from tests.integration.ending_in_time import LIMIT_S, stopped, timed
from tests.integration.rests import at_rest
from tests.processes import wait_for

pytestmark = pytest.mark.integration

ROWS = TensorDict({"number": torch.arange(100)}, [100])

TIMEOUT_S = 0.3


class WorkFailedError(Exception):
    """What work on rows raises."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tdserve.Server]:
    """A server that stands still from time to time, with a queue, and a table without rows."""
    with Crashing(tmp_path_factory.mktemp("give-back")) as made:
        with made.server.client() as client:
            client.create_queue("queue", ROWS[0], 10_000).extend(ROWS)
            client.create_replay("empty", ROWS[0], 1000)
        yield made.server


@pytest.fixture(params=["shm", "gloo"])
def client(
    request: pytest.FixtureRequest, server: tdserve.Server, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tdserve.Client]:
    """A client with a session, whose timeout is set to a short one later. A wait that ignored it would take a
    minute."""
    monkeypatch.setattr(taking, "GIVE_BACK_TIMEOUT_S", 60.0)
    monkeypatch.setattr(batches, "JOIN_TIMEOUT_S", 60.0)
    with server.client(transport=request.param) as made:
        yield made


def fail_in(block: Any) -> None:
    """Ends a block that was entered by an error."""
    with suppress(WorkFailedError):
        error = WorkFailedError()
        block.__exit__(type(error), error, None)


def enter_take(client: tdserve.Client) -> Callable[[], object]:
    """Enters a block with rows; returns what ends it."""
    block = client.queue("queue").take(2)
    block.__enter__()
    return partial(fail_in, block)


def begin_batches(client: tdserve.Client) -> Any:
    """Returns an iterator that has rows on lease."""
    taken = client.queue("queue").batches(2)
    next(taken)
    return taken


def begin_prefetching(client: tdserve.Client) -> Callable[[], object]:
    """Begins to draw samples ahead, which waits for rows; returns what ends it."""
    before = client.describe("empty").num_waiting
    prefetching = client.replay("empty").batches(8)
    wait_for(lambda: client.describe("empty").num_waiting > before, "a request that waits")
    return prefetching.close


ENDS: dict[str, Callable[[tdserve.Client], Callable[[], object]]] = {
    "block of take": enter_take,
    "close of batches": lambda client: begin_batches(client).close,
    "block of batches": lambda client: partial(fail_in, begin_batches(client)),
    "close of prefetched batches": begin_prefetching,
}


@pytest.mark.slow
@pytest.mark.parametrize("end", ENDS)
def test_end_of_a_lease_when_the_server_stands_still_then_no_later_than_the_clients_timeout(
    server: tdserve.Server, client: tdserve.Client, end: str
) -> None:
    call = ENDS[end](client)
    client.timeout_s = TIMEOUT_S
    with stopped(server):
        assert timed(call) < LIMIT_S


@pytest.mark.slow
def test_block_when_its_task_is_cancelled_and_the_server_stands_still_then_no_later_than_the_clients_timeout(
    server: tdserve.Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(taking, "GIVE_BACK_TIMEOUT_S", 60.0)

    async def run() -> None:
        async with tdserve.aio.connect(server.address, transport="gloo") as client:
            queue = await client.queue("queue")
            async with queue.take(2):
                client.timeout_s = TIMEOUT_S
                entered.set()
                await asyncio.Event().wait()

    async def cancel() -> float:
        task = asyncio.create_task(run())
        await asyncio.wait_for(entered.wait(), 30.0)
        begun_s = asyncio.get_running_loop().time()
        with stopped(server):
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task
            return asyncio.get_running_loop().time() - begun_s

    entered = asyncio.Event()
    assert asyncio.run(cancel()) < LIMIT_S


def test_rows_when_they_were_not_given_back_in_time_then_they_are_as_soon_as_the_queue_serves_again(
    server: tdserve.Server,
) -> None:
    with server.client(transport="gloo", timeout_s=30.0) as client:
        queue = client.create_queue("rested", ROWS[0], 100)
        queue.extend(ROWS[:4])
        block = queue.take(4)
        block.__enter__()
        client.timeout_s = TIMEOUT_S
        with at_rest(server, "rested"):
            fail_in(block)
        client.timeout_s = 30.0
        with queue.take(4) as again:
            assert again["number"].tolist() == [0, 1, 2, 3]
