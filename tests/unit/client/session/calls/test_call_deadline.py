"""The time of a block: in threads, in tasks, and in calls that outlive it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context

import tdserve
from tdserve.client.session.calls.call_deadline import begin_call, begin_step, get_call_deadline

DEFAULT_S = 30.0


def test_block_when_it_ends_then_the_outer_one_holds_and_then_none() -> None:
    with tdserve.within(20.0):
        with tdserve.within(10.0):
            assert begin_call(None, DEFAULT_S).timeout_s == 10.0
        assert begin_call(None, DEFAULT_S).timeout_s == 20.0
        assert begin_step(None).timeout_s == 20.0
        assert begin_step(5.0).timeout_s == 5.0
    assert begin_call(None, DEFAULT_S).timeout_s == DEFAULT_S
    assert begin_step(None).timeout_s is None


def test_block_when_another_thread_calls_then_it_has_its_default() -> None:
    with tdserve.within(10.0), ThreadPoolExecutor(1) as threads:
        assert threads.submit(get_call_deadline).result() is None


def test_block_when_tasks_begin_in_it_then_it_is_theirs_and_of_no_other() -> None:
    async def find() -> float | None:
        return begin_call(None, DEFAULT_S).timeout_s

    async def scenario() -> None:
        before = asyncio.create_task(find())
        with tdserve.within(10.0):
            assert {*await asyncio.gather(find(), find())} == {10.0}
            assert await before == DEFAULT_S

    asyncio.run(scenario())


def test_block_when_a_task_outlives_it_then_it_has_the_outer_one_and_then_its_default() -> None:
    async def scenario() -> None:
        asked: asyncio.Queue[None] = asyncio.Queue()
        found: asyncio.Queue[float | None] = asyncio.Queue()

        async def answer() -> None:
            for _ in range(3):
                await asked.get()
                await found.put(begin_call(None, DEFAULT_S).timeout_s)

        async def ask() -> float | None:
            await asked.put(None)
            return await found.get()

        with tdserve.within(20.0):
            with tdserve.within(10.0):
                task = asyncio.create_task(answer())
                assert await ask() == 10.0
            assert await ask() == 20.0
        assert await ask() == DEFAULT_S
        await task

    asyncio.run(scenario())


def test_block_when_its_context_is_kept_then_over_there_too() -> None:
    with tdserve.within(10.0):
        kept = copy_context()
        assert kept.run(get_call_deadline) is not None
    assert kept.run(get_call_deadline) is None


def yield_in_block(seconds: float) -> Iterator[None]:
    """Is in a block whenever it waits to go on."""
    with tdserve.within(seconds):
        yield


def test_block_when_one_of_a_generator_ends_amid_it_then_it_goes_on_and_then_none_is_left() -> None:
    for _ in range(2):
        generator = yield_in_block(20.0)
        next(generator)
        assert begin_call(None, DEFAULT_S).timeout_s == 20.0  # applies to the code that iterates
        with tdserve.within(10.0):
            assert next(generator, "end") == "end"
            assert begin_call(None, DEFAULT_S).timeout_s == 10.0
        assert begin_call(None, DEFAULT_S).timeout_s == DEFAULT_S


def test_block_when_it_ends_amid_one_of_a_generator_then_that_one_goes_on() -> None:
    generator = yield_in_block(10.0)
    with tdserve.within(20.0):
        next(generator)
    assert begin_call(None, DEFAULT_S).timeout_s == 10.0
    assert next(generator, "end") == "end"
    assert begin_call(None, DEFAULT_S).timeout_s == DEFAULT_S
