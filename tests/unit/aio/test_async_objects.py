"""Calls that wait for a thread."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
import torch
from tensordict import TensorDict

import tdserve
from tdserve import aio
from tests.roots import make_quick_root

TIMEOUT_S = 30.0
ROW = TensorDict({"x": torch.zeros(3)}, [])


@pytest.fixture(scope="module")
def server() -> Iterator[tdserve.Server]:
    with make_quick_root() as root, tdserve.Server(root, grace_s=1.0) as started:
        yield started


def test_calls_when_their_time_is_over_before_they_have_a_thread_then_deadline_exceeded(
    server: tdserve.Server,
) -> None:
    async def scenario() -> None:
        async with aio.AsyncClient(server.client(timeout_s=TIMEOUT_S), max_threads=1) as client:
            await client.publish("w", ROW)
            kv = await client.create_kv("kv")
            holding = asyncio.ensure_future(kv.get("absent", timeout_s=TIMEOUT_S))
            calls = [
                client.latest("w", newer_than=1, timeout_s=0.001),
                kv.get("none", timeout_s=0.001),
                kv.get("none", None, 0.001),
            ]
            waiting = [asyncio.ensure_future(call) for call in calls]
            await asyncio.wait([holding], timeout=0.01)  # longer than each of them has
            kv.sync.put("absent", 7)
            found = await asyncio.gather(*waiting, return_exceptions=True)
            assert await holding == 7
            assert [type(each) for each in found] == [tdserve.DeadlineExceededError] * 3
            assert all("a free thread" in str(each) for each in found)
            for name in await client.stores():
                await client.delete(name)

    asyncio.run(scenario())
