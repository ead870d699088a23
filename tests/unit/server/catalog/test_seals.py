from __future__ import annotations

import asyncio

import pytest

from tdserve.rules.catalog import Catalog
from tdserve.server.catalog.seals import SLOW_CREATION_S, Seal, SealedStores

BY, OTHER = Seal(1, "checkpoint"), Seal(2, "another")


@pytest.fixture
def seals() -> SealedStores:
    return SealedStores(Catalog())


def may_be_made_at_once(seals: SealedStores) -> bool:
    """Returns whether a store may be made without a wait."""
    waiting = seals.wait_for_creation()
    try:
        waiting.send(None)
    except StopIteration:
        return True
    waiting.close()
    return False


def test_creations_when_two_hold_them_then_wait_for_both(seals: SealedStores) -> None:
    async def run() -> None:
        with seals.hold_creations():
            with seals.hold_creations():
                waiting = asyncio.create_task(seals.wait_for_creation())
                await asyncio.sleep(0)
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            assert not waiting.done()
            assert not may_be_made_at_once(seals)
        await waiting
        assert may_be_made_at_once(seals)

    asyncio.run(run())


def test_creations_when_slow_then_one_after_the_other_until_nothing_slows_them(seals: SealedStores) -> None:
    async def run() -> None:
        loop = asyncio.get_running_loop()
        seals.slow_creations(BY)
        seals.slow_creations(OTHER)
        before_s = loop.time()
        await asyncio.gather(*(seals.wait_for_creation() for _ in range(3)))
        assert loop.time() - before_s >= 1.9 * SLOW_CREATION_S
        seals.end_slow_creations(BY)
        seals.end_slow_creations(BY)
        assert not may_be_made_at_once(seals)
        seals.end_slow_creations_of(OTHER.session)
        assert may_be_made_at_once(seals)

    asyncio.run(run())
