from __future__ import annotations

import asyncio

from tdserve.base.deadline import Deadline
from tdserve.server.execution.waiting import Waiters
from tests.unit.server.world import Loop, World


def test_cancel_when_a_retry_waits_for_the_attempt_that_moves_then_reaches_both(world: World, run: Loop) -> None:
    async def scenario() -> list[str]:
        session, ends = world.session(), list[str]()
        moved = asyncio.Event()

        async def attempt() -> None:
            session.begin(1)
            await moved.wait()
            try:
                await session.wait(Waiters(), lambda: None, Deadline.after(10.0), lambda: "")
            except asyncio.CancelledError:
                ends.append("attempt")
            finally:
                session.end(1)

        async def retry() -> None:
            try:
                await session.wait_ended(1)
            except asyncio.CancelledError:
                ends.append("retry")

        session.run(attempt(), 1)
        session.run(retry(), 1)
        await asyncio.sleep(0)
        assert session.cancel(1)
        moved.set()
        while session.requests:  # noqa: ASYNC110 (the wait's deadline ends it)
            await asyncio.sleep(0)
        assert not session.cancelled_requests
        return ends

    assert run(scenario()) == ["retry", "attempt"]
