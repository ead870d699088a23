"""Coroutines of the client of several servers."""

from __future__ import annotations

import asyncio

import pytest
import torch
from tensordict import TensorDict

import tdserve
from tests.integration.cluster.names import next_name

pytestmark = pytest.mark.integration


@pytest.mark.slow
def test_aio_when_stores_are_shared_then_their_calls_are_coroutines(address: str) -> None:
    name, like = next_name(), TensorDict({"number": torch.tensor(0)}, [])

    async def run() -> list[int]:
        async with tdserve.aio.connect(address) as client:
            queue = await client.create_queue(name, like, 90, shards="all")
            await asyncio.gather(
                *(queue.extend(TensorDict({"number": torch.arange(5) + 5 * n}, [5]), writer=n) for n in range(1, 4))
            )
            taken: list[int] = []
            async with queue.take(6) as batch:
                taken += batch["number"].tolist()
            await queue.close()
            async with queue.batches(4) as batches:
                async for batch in batches:
                    taken += batch["number"].tolist()
            keyed = await client.create_kv(f"{name}-keyed", shards="all")
            await keyed.put(["a", "b"], [1, 2])
            assert await keyed.get(["b", "a"]) == [2, 1]
            await client.delete(f"{name}-keyed")
            await client.delete(name)
            return taken

    assert sorted(asyncio.run(run())) == list(range(5, 20))
