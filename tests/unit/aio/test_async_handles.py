"""Iterators over entries."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

import tdserve
from tdserve import aio
from tests.roots import make_quick_root


@pytest.fixture(scope="module")
def server() -> Iterator[tdserve.Server]:
    with make_quick_root() as root, tdserve.Server(root, grace_s=1.0) as started:
        yield started


def test_entries_when_iterated_twice_then_the_second_continues_behind_the_first(
    server: tdserve.Server,
) -> None:
    async def scenario() -> None:
        async with aio.connect(server.address) as client:
            kv = await client.create_kv("kv")
            keys = [f"{number:03}" for number in range(100)]
            await kv.put(keys, keys)
            items, seen = await kv.items(), []
            async for key, _ in items:
                seen.append(key)
                if len(seen) == 5:
                    break
            stepping = asyncio.ensure_future(anext(items))
            seen.append((await stepping)[0])
            async for key, _ in items:
                seen.append(key)
            assert seen == keys
            assert [key async for key, _ in items] == []
            await client.delete("kv")

    asyncio.run(scenario())
