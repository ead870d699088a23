from __future__ import annotations

import asyncio

import pytest

from tdserve.deadline import Deadline
from tdserve.errors import DeadlineExceededError, StoreNotFoundError
from tdserve.server.waiting import Waiters
from tests.unit.server.world import Loop


def nothing() -> int | None:
    """A state that does not come."""
    return None


def test_wait_when_the_state_is_there_then_returns_at_once_even_without_time(run: Loop) -> None:
    assert run(Waiters().wait_for(lambda: 0, Deadline.after(0), lambda: "")) == 0


def test_wait_when_woken_then_looks_again(run: Loop) -> None:
    async def scenario() -> tuple[int, list[int]]:
        waiters, looks, state = Waiters(), [0], [0]

        def look() -> int | None:
            looks[0] += 1
            return state[0] if state[0] > 1 else None

        waiting = asyncio.create_task(waiters.wait_for(look, Deadline.never, lambda: ""))
        for _ in range(2):
            await asyncio.sleep(0)
            state[0] += 1
            waiters.wake()
        return await waiting, looks

    assert run(scenario()) == (2, [3])


def test_wait_when_time_is_over_then_error_says_what_and_how_long(run: Loop) -> None:
    with pytest.raises(DeadlineExceededError, match=r"a miracle did not happen within 0\.01 s"):
        run(Waiters().wait_for(lambda: None, Deadline.after(0.01), lambda: "a miracle"))


def test_wait_when_the_state_changes_unseen_then_found_in_the_last_moment(run: Loop) -> None:
    looks = iter([None, "found"])
    assert run(Waiters().wait_for(lambda: next(looks), Deadline.after(0.01), lambda: "")) == "found"


def test_wait_when_cancelled_then_nobody_waits_any_more(run: Loop) -> None:
    async def scenario() -> int:
        waiters = Waiters()
        waiting = asyncio.create_task(waiters.wait_for(nothing, Deadline.never, lambda: ""))
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.wait([waiting])
        return len(waiters._lines)

    assert run(scenario()) == 0


def test_wake_when_ten_thousand_wait_then_all_return(run: Loop) -> None:
    async def scenario() -> int:
        waiters, state = Waiters(), [False]
        waits = [waiters.wait_for(lambda: state[0] or None, Deadline.never, lambda: "") for _ in range(10_000)]
        tasks = [asyncio.create_task(wait) for wait in waits]
        await asyncio.sleep(0)
        state[0] = True
        waiters.wake()
        return sum(await asyncio.gather(*tasks))

    assert run(scenario()) == 10_000


def test_delete_when_somebody_waits_then_now_and_later_told(run: Loop) -> None:
    async def scenario() -> list[str]:
        waiters = Waiters()
        waiting = asyncio.create_task(waiters.wait_for(nothing, Deadline.never, lambda: ""))
        await asyncio.sleep(0)
        waiters.delete("x")
        later = asyncio.create_task(waiters.wait_for(lambda: 1, Deadline.never, lambda: ""))
        errors = await asyncio.gather(waiting, later, return_exceptions=True)
        return [error.name for error in errors if isinstance(error, StoreNotFoundError)]

    assert run(scenario()) == ["x", "x"]
