from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest

from tdserve.server import eager
from tests.unit.server.world import outside

TIMEOUT_S = 20.0

_Task = asyncio.Task[None]


def run(scenario: Coroutine[Any, Any, Any]) -> Any:
    """Runs a scenario to its end."""
    return asyncio.run(asyncio.wait_for(scenario, TIMEOUT_S))


def test_start_when_the_coroutine_never_waits_then_it_is_over_and_there_is_no_task() -> None:
    ends: list[_Task | None] = []

    async def work() -> None:
        ends.append(asyncio.current_task())

    async def scenario() -> None:
        def begin() -> None:
            assert eager.start(work(), name="work") is None
            assert ends == [None]

        await outside(begin)

    run(scenario())


def test_start_when_what_it_waits_for_is_there_then_it_is_over_too() -> None:
    async def scenario() -> None:
        there = asyncio.get_running_loop().create_future()
        there.set_result(7)
        found: list[int] = []

        async def work() -> None:
            found.append(await there)

        assert await outside(lambda: eager.start(work(), name="work")) is None
        assert found == [7]

    run(scenario())


def test_start_when_the_coroutine_waits_then_the_rest_runs_in_a_task() -> None:
    async def scenario() -> list[Any]:
        steps: list[Any] = []
        first, second = (asyncio.get_running_loop().create_future() for _ in range(2))

        async def work() -> None:
            steps.append(asyncio.current_task())
            steps.append(await first)
            await asyncio.sleep(0)
            steps.append(await asyncio.wait_for(second, TIMEOUT_S))
            steps.append(asyncio.current_task())

        def begin() -> _Task | None:
            task = eager.start(work(), name="work")
            assert steps == [None]  # its first step was taken already
            return task

        task = await outside(begin)
        first.set_result("first")
        second.set_result("second")
        await task
        assert task.get_name() == "work"
        assert steps == [None, "first", "second", task]
        return steps

    run(scenario())


@pytest.mark.parametrize("num_waits", [0, 1, 2])
def test_start_when_the_coroutine_fails_then_raised_here_before_its_first_wait_and_by_the_task_after_it(
    num_waits: int,
) -> None:
    async def work() -> None:
        for _ in range(num_waits):
            await asyncio.sleep(0)
        raise ZeroDivisionError

    async def scenario() -> None:
        if num_waits == 0:
            with pytest.raises(ZeroDivisionError):
                await outside(lambda: eager.start(work(), name="work"))
        else:
            task = await outside(lambda: eager.start(work(), name="work"))
            with pytest.raises(ZeroDivisionError):
                await task

    run(scenario())


def test_start_when_what_it_waits_for_fails_then_the_coroutine_may_handle_it() -> None:
    async def scenario() -> None:
        broken = asyncio.get_running_loop().create_future()
        ends: list[str] = []

        async def work() -> None:
            try:
                await broken
            except ZeroDivisionError:
                await asyncio.sleep(0)
                ends.append("handled")

        task = await outside(lambda: eager.start(work(), name="work"))
        broken.set_exception(ZeroDivisionError())
        await task
        assert ends == ["handled"]

    run(scenario())


@pytest.mark.parametrize("handles", [True, False])
def test_task_when_cancelled_then_the_coroutine_is(handles: bool) -> None:
    async def scenario() -> None:
        ends: list[str] = []

        async def work() -> None:
            try:
                await asyncio.get_running_loop().create_future()
            except asyncio.CancelledError:
                ends.append("cancelled")
                if not handles:
                    raise
                await asyncio.sleep(0)
                ends.append("answered")
            finally:
                ends.append("over")

        task = await outside(lambda: eager.start(work(), name="work"))
        task.cancel()
        await asyncio.wait({task})
        assert task.cancelled() is not handles
        assert ends == (["cancelled", "answered", "over"] if handles else ["cancelled", "over"])

    run(scenario())


def test_in_task_when_outside_one_then_what_follows_runs_in_the_task() -> None:
    async def scenario() -> None:
        found: list[_Task | None] = []

        async def work() -> None:
            found.append(asyncio.current_task())
            await eager.in_task()
            found.append(asyncio.current_task())

        task = await outside(lambda: eager.start(work(), name="work"))
        await task
        assert found == [None, task]

    run(scenario())


def test_in_task_when_inside_one_then_goes_on_at_once() -> None:
    async def scenario() -> None:
        is_later = asyncio.Event()
        asyncio.get_running_loop().call_soon(is_later.set)
        await eager.in_task()
        assert not is_later.is_set()

    run(scenario())


def test_task_when_cancelled_before_its_first_turn_then_the_coroutine_is_told() -> None:
    async def scenario() -> None:
        ends: list[str] = []

        async def work() -> None:
            try:
                await asyncio.get_running_loop().create_future()
            except asyncio.CancelledError:
                ends.append("cancelled")
                await asyncio.sleep(0)
                ends.append("answered")

        def begin() -> Any:
            task = eager.start(work(), name="work")
            assert task is not None
            task.cancel()
            return task

        task = await outside(begin)
        await asyncio.wait({task})
        assert ends == ["cancelled", "answered"]

    asyncio.run(asyncio.wait_for(scenario(), TIMEOUT_S))
