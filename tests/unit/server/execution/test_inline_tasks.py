from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest

from tdserve.server.execution import inline_tasks
from tdserve.server.execution.inline_tasks import InlineFuture
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
            assert inline_tasks.start(work(), name="work") is None
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

        assert await outside(lambda: inline_tasks.start(work(), name="work")) is None
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
            task = inline_tasks.start(work(), name="work")
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
                await outside(lambda: inline_tasks.start(work(), name="work"))
        else:
            task = await outside(lambda: inline_tasks.start(work(), name="work"))
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

        task = await outside(lambda: inline_tasks.start(work(), name="work"))
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

        task = await outside(lambda: inline_tasks.start(work(), name="work"))
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
            await inline_tasks.ensure_task()
            found.append(asyncio.current_task())

        task = await outside(lambda: inline_tasks.start(work(), name="work"))
        await task
        assert found == [None, task]

    run(scenario())


def test_in_task_when_inside_one_then_goes_on_at_once() -> None:
    async def scenario() -> None:
        is_later = asyncio.Event()
        asyncio.get_running_loop().call_soon(is_later.set)
        await inline_tasks.ensure_task()
        assert not is_later.is_set()

    run(scenario())


def test_task_when_cancelled_before_its_first_turn_then_the_coroutine_gets_the_cancellation() -> None:
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
            task = inline_tasks.start(work(), name="work")
            assert task is not None
            task.cancel()
            return task

        task = await outside(begin)
        await asyncio.wait({task})
        assert ends == ["cancelled", "answered"]

    asyncio.run(asyncio.wait_for(scenario(), TIMEOUT_S))


def test_turn_when_awaited_outside_a_task_then_goes_on_within_the_call_that_ends_it() -> None:
    async def scenario() -> None:
        turns: list[InlineFuture[int]] = [InlineFuture(), InlineFuture()]
        found: list[Any] = []

        async def work() -> None:
            found.append(await turns[0])
            try:
                await turns[1]
            except ZeroDivisionError:
                found.append(asyncio.current_task())

        def step() -> None:
            assert inline_tasks.start(work(), name="work") is None
            assert not turns[0].done()
            turns[0].set_result(7)
            assert turns[0].done()
            assert found == [7]
            turns[1].set_exception(ZeroDivisionError())
            assert found == [7, None]

        await outside(step)

    run(scenario())


def test_turn_when_the_coroutine_waits_for_something_else_afterwards_then_in_a_task_that_is_kept() -> None:
    async def scenario() -> None:
        turn: InlineFuture[int] = InlineFuture()
        kept: list[_Task] = []

        async def work() -> None:
            await turn
            await asyncio.sleep(0)

        def step() -> None:
            inline_tasks.start(work(), name="work", keep=kept.append)
            assert kept == []
            turn.set_result(7)

        await outside(step)
        assert [task.get_name() for task in kept] == ["work"]
        await kept[0]

    run(scenario())


@pytest.mark.parametrize("moves", [True, False])
def test_turn_when_moved_to_a_task_or_ended_by_one_then_goes_on_there(moves: bool) -> None:
    async def scenario() -> None:
        turn: InlineFuture[int] = InlineFuture()
        kept: list[_Task] = []
        found: list[Any] = []

        async def work() -> None:
            found.extend([await turn, asyncio.current_task()])

        await outside(lambda: inline_tasks.start(work(), name="work", keep=kept.append))
        if moves:
            turn.move_to_task()
            turn.move_to_task()
        turn.set_result(7)
        await kept[0]
        assert found == [7, kept[0]]
        assert len(kept) == 1

    run(scenario())


def test_turn_when_its_task_is_cancelled_then_the_coroutine_is_and_a_late_end_does_no_harm() -> None:
    async def scenario() -> None:
        turn: InlineFuture[int] = InlineFuture()
        kept: list[_Task] = []

        async def work() -> None:
            await turn

        await outside(lambda: inline_tasks.start(work(), name="work", keep=kept.append))
        turn.move_to_task()
        kept[0].cancel()
        await asyncio.wait(kept)
        assert kept[0].cancelled()
        turn.set_result(7)

    run(scenario())


def test_turn_when_awaited_in_a_task_or_over_already_then_its_result() -> None:
    async def scenario() -> None:
        turn: InlineFuture[int] = InlineFuture()
        asyncio.get_running_loop().call_soon(turn.set_result, 7)
        assert await turn == 7
        early: InlineFuture[int] = InlineFuture()
        early.set_exception(ZeroDivisionError())
        with pytest.raises(ZeroDivisionError):
            await early

    run(scenario())
