from __future__ import annotations

import asyncio
from collections.abc import Iterator

from tdserve.server.turns import in_turns
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

        await in_turns(work())
        return order

    assert run(scenario())[:5] == ["0", "other", "1", "other", "2"]


def test_in_turns_when_there_is_one_step_then_it_needs_no_loop() -> None:
    work = in_turns(iter(()))
    try:
        work.send(None)
    except StopIteration:
        return
    raise AssertionError("it has waited")
