"""Stores that are sealed, at rest or gone, as their waiters know it."""

from __future__ import annotations

import asyncio

import pytest

from tdserve.base.deadline import Deadline
from tdserve.base.errors import StoreMovedError, StoreNotFoundError, TDServeError
from tdserve.server.execution.waiting import Waiters
from tests.unit.server.world import Loop


def nothing() -> int | None:
    """A state that does not come."""
    return None


def test_presence_when_sealed_at_rest_or_gone_then_distinguished(run: Loop) -> None:
    async def scenario() -> None:
        waiters = Waiters()
        waiting = asyncio.create_task(waiters.wait_for(nothing, Deadline.never, lambda: ""))
        await asyncio.sleep(0)
        waiters.begin_seal("x")
        with pytest.raises(StoreMovedError):
            await waiting
        with pytest.raises(StoreMovedError):
            waiters.check_present()
        waiters.check_not_gone()
        assert (waiters.is_away, waiters.is_at_rest, waiters.is_gone) == (True, False, False)
        waiters.begin_rest()
        assert waiters.is_at_rest
        waiters.end_seal()
        waiters.check_present()
        assert (waiters.is_away, waiters.is_at_rest) == (False, False)

    run(scenario())


@pytest.mark.parametrize("is_deleted", [True, False])
def test_presence_when_gone_then_for_good_even_if_a_seal_ends(run: Loop, is_deleted: bool) -> None:
    async def scenario() -> None:
        waiters = Waiters()
        waiters.begin_seal("x")
        (waiters.delete if is_deleted else waiters.retire)("x")
        waiters.end_seal()
        reason: type[TDServeError] = StoreNotFoundError if is_deleted else StoreMovedError
        for check in (waiters.check_present, waiters.check_not_gone):
            with pytest.raises(reason):
                check()
        assert (waiters.is_away, waiters.is_gone, waiters.is_deleted) == (True, True, is_deleted)

    run(scenario())


@pytest.mark.parametrize("comes_back", [True, False])
def test_deferred_when_the_seal_ends_then_done_once_unless_the_store_is_gone(run: Loop, comes_back: bool) -> None:
    async def scenario() -> list[str]:
        waiters, done = Waiters(), list[str]()
        waiters.begin_seal("x")
        waiters.begin_rest()
        waiters.defer(lambda: done.append("done"))
        if not comes_back:
            waiters.retire("x")
        await asyncio.sleep(0)
        assert not done
        for _ in range(2):
            waiters.end_seal()
            await asyncio.sleep(0)
        return done

    assert run(scenario()) == (["done"] if comes_back else [])
