from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from typing import Any, ClassVar

from tdserve.server.execution.turns import drop_references, run_in_turns
from tests.unit.server.world import Loop


def test_in_turns_when_there_are_steps_then_others_have_their_turn_between(run: Loop) -> None:
    async def scenario() -> list[str]:
        order: list[str] = []

        def work() -> Iterator[None]:
            for number in range(3):
                order.append(str(number))
                asyncio.get_running_loop().call_soon(order.append, "other")
                if number < 2:
                    yield

        await run_in_turns(work())
        return order

    assert run(scenario())[:5] == ["0", "other", "1", "other", "2"]


def test_in_turns_when_there_is_one_step_then_it_needs_no_loop() -> None:
    work = run_in_turns(iter(()))
    try:
        work.send(None)
    except StopIteration:
        return
    raise AssertionError("it has waited")


def test_free_apart_when_rows_are_very_many_then_a_thread_lets_go_of_them(run: Loop) -> None:
    class Freed:
        threads: ClassVar[list[str]] = []
        is_gone = threading.Event()

        def __del__(self) -> None:
            self.threads.append(threading.current_thread().name)
            self.is_gone.set()

    async def scenario() -> None:
        for num_rows in (1, 10_000_000):
            references: list[Any] = [Freed()]
            drop_references(references, num_rows=num_rows)
            del references
            await asyncio.to_thread(Freed.is_gone.wait, 20.0)
            Freed.is_gone.clear()

    run(scenario())
    assert Freed.threads[0] == threading.current_thread().name
    assert Freed.threads[1] != threading.current_thread().name
