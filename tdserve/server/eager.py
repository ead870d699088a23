"""Tasks whose first step is taken at once, as ``eager_start`` of Python 3.12 does it.

A request that need not wait gives its order to a worker within that step. As an ordinary task it would begin one turn
of the event loop later, which costs about a tenth of what the whole of a small request takes (measured).
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Generator
from typing import Any


def start(coroutine: Coroutine[Any, Any, None], *, name: str) -> asyncio.Task[None] | None:
    """Runs a coroutine to its first wait, and the rest in a task.

    Call it outside a task. Until its first wait the coroutine belongs to none either; ``in_task`` is its way into one.

    Returns:
        The task, or None when nothing is left to do. What the coroutine raises before its first wait is raised here.
    """
    try:
        waited_for = coroutine.send(None)
    except StopIteration:
        return None
    return asyncio.get_running_loop().create_task(_Rest(coroutine, waited_for), name=name)


async def in_task() -> None:
    """Makes sure that what follows runs in a task, which can be cancelled."""
    if asyncio.current_task() is None:
        await asyncio.sleep(0)


class _Rest(Coroutine[Any, Any, None]):
    """Goes on with a coroutine that has begun: a task sees what it waits for first, and reaches it from then on."""

    def __init__(self, coroutine: Coroutine[Any, Any, None], waited_for: Any) -> None:
        self._coroutine = coroutine
        self._waited_for = [waited_for]

    def send(self, value: Any) -> Any:
        return self._waited_for.pop() if self._waited_for else self._coroutine.send(value)

    def throw(self, *error: Any) -> Any:
        self._waited_for.clear()
        return self._coroutine.throw(*error)

    def close(self) -> None:
        self._coroutine.close()

    def __await__(self) -> Generator[Any, Any, None]:
        raise NotImplementedError  # tasks use send and throw
