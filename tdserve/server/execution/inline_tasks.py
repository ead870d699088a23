"""Tasks whose first step runs at once, like ``eager_start`` of Python 3.12.

A request that need not wait sends its order to a worker within that step. An ordinary task would begin one turn of the
event loop later, which costs about a tenth of the whole time of a small request (measured).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Generator
from typing import Any, Generic, TypeVar

_Result = TypeVar("_Result")
_Keep = Callable[["asyncio.Task[None]"], None]


def _do_nothing(task: asyncio.Task[None]) -> None:
    """Does nothing: the default ``keep``, for callers that keep the task themselves."""


def start(coroutine: Coroutine[Any, Any, None], *, name: str, keep: _Keep = _do_nothing) -> asyncio.Task[None] | None:
    """Runs a coroutine up to its first wait, and the rest in a task, or in none if it waits for an ``InlineFuture``.

    Call it outside a task. Up to its first wait the coroutine runs outside any task too; ``ensure_task`` moves it into
    one.

    Args:
        name: Name of the task.
        keep: Called with the task, now or once there is one.

    Returns:
        The task, or None if there is none. What the coroutine raises before its first wait is raised here.
    """
    try:
        waited_for = coroutine.send(None)
    except StopIteration:
        return None
    if isinstance(waited_for, InlineFuture):
        waited_for.hold(coroutine, name, keep)
        return None
    return _begin(coroutine, waited_for, name, keep)


def _begin(coroutine: Coroutine[Any, Any, None], waited_for: Any, name: str, keep: _Keep) -> asyncio.Task[None]:
    task = asyncio.get_running_loop().create_task(_Continuation(coroutine, waited_for), name=name)
    keep(task)
    return task


class InlineFuture(Generic[_Result]):
    """A result that a message brings. A coroutine that awaits it outside a task resumes while that message is handled.

    So a request of two messages needs no task and no further turn of the event loop. It can be awaited once.
    """

    def __init__(self) -> None:
        self._held: tuple[Coroutine[Any, Any, None], str, _Keep] | None = None
        self._future: asyncio.Future[None] | None = None
        self._outcome: _Result | BaseException | None = None
        self._is_over = False

    def __await__(self) -> Generator[Any, None, _Result]:
        if not self._is_over:
            if asyncio.current_task() is None:
                yield self
            else:
                self._future = asyncio.get_running_loop().create_future()
                yield from self._future
        outcome, self._outcome = self._outcome, None
        if isinstance(outcome, BaseException):
            try:
                raise outcome
            finally:
                del outcome  # its traceback has this call
        return outcome  # type: ignore[return-value]

    def done(self) -> bool:
        """Returns whether the result or an error is set."""
        return self._is_over

    def set_result(self, result: _Result) -> None:
        """Sets the result. The coroutine resumes before this returns, unless it or the caller runs in a task."""
        self._end(result)

    def set_exception(self, error: BaseException) -> None:
        """Like ``set_result``; the coroutine gets an error."""
        self._end(error)

    def hold(self, coroutine: Coroutine[Any, Any, None], name: str, keep: _Keep) -> None:
        """Holds a coroutine that has begun and waits for this; arguments as for ``start``."""
        self._held = (coroutine, name, keep)

    def move_to_task(self) -> None:
        """Moves the waiting coroutine into a task, which can itself be waited for."""
        held, self._held = self._held, None
        if held is not None:
            self._future = asyncio.get_running_loop().create_future()
            coroutine, name, keep = held
            _begin(coroutine, next(self._future.__await__()), name, keep)

    def _end(self, outcome: _Result | BaseException) -> None:
        self._outcome, self._is_over = outcome, True
        if self._held is not None and asyncio.current_task() is None:
            (coroutine, name, keep), self._held = self._held, None
            start(coroutine, name=name, keep=keep)
            return
        self.move_to_task()
        if self._future is not None and not self._future.done():
            self._future.set_result(None)


async def ensure_task() -> None:
    """Ensures that what follows runs in a task, which can be cancelled."""
    if asyncio.current_task() is None:
        await asyncio.sleep(0)


class _Continuation(Coroutine[Any, Any, None]):
    """The rest of a coroutine that has begun, for a task: it first yields what the coroutine already waits for."""

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
