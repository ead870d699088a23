"""Coroutines that wait for a state to change; ten thousand of them hold no thread, and cost a change nothing.

Those that wait for the same stand in one line: a change is shown to the first of each line, and to the next only when
it was what the first has waited for.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from tdserve.base.deadline import Deadline
from tdserve.base.errors import DeadlineExceededError, StoreNotFoundError

_State = TypeVar("_State")


def hear(task: asyncio.Future[Any]) -> None:
    """A callback for what ended with nobody waiting: asyncio complains of exceptions that nobody looks at."""
    if not task.cancelled():
        task.exception()


MAX_LOOKS = 256
"""Of those that wait for one thing, one after the other without a turn for anybody else: a few microseconds each."""


@dataclass(eq=False)
class _Waiter(Generic[_State]):
    look: Callable[[], _State | None]
    future: asyncio.Future[_State | None]


class Waiters:
    """Who waits for one thing (a store, its rows, its newest version) to change.

    Attributes:
        on_wait: Called when somebody begins to wait, who looks once more afterwards.
    """

    def __init__(self) -> None:
        self.on_wait: Callable[[], None] | None = None
        self._lines: dict[Hashable, dict[_Waiter[Any], None]] = {}  # of each line who stands in it, in order
        self._num_waiting = 0
        self._is_looking = False
        self._is_changed = False  # since the lines were last gone through from the first on
        self._left: deque[dict[_Waiter[Any], None]] = deque()  # lines that were not gone through yet
        self._deleted_name: str | None = None

    def wake(self) -> None:
        """Lets waiters look again, soon: several changes in one turn of the loop are one."""
        self._is_changed = True
        if self._lines and not self._is_looking:
            self._is_looking = True
            asyncio.get_running_loop().call_soon(self._look)

    def delete(self, name: str) -> None:
        """The store ``name``, whose states these are, is no more: whoever waits, now or later, is told so."""
        self._deleted_name = name
        self.wake()

    @property
    def is_deleted(self) -> bool:
        """Whether ``delete`` was called."""
        return self._deleted_name is not None

    def check_present(self) -> None:
        """Raises StoreNotFoundError after ``delete``."""
        if self._deleted_name is not None:
            raise StoreNotFoundError(name=self._deleted_name)

    @property
    def num_waiting(self) -> int:
        """How many wait right now."""
        return self._num_waiting

    def has_line(self, line: Hashable) -> bool:
        """Whether somebody waits in this line, behind whom a newcomer has to stand."""
        return bool(self._lines.get(line))  # empty: the last was served just now, and has not gone on yet

    def at_once(self, look: Callable[[], _State | None], line: Hashable) -> _State | None:
        """The state, if it is there and nobody stands in line for it; arguments and errors as of ``wait_for``."""
        self.check_present()
        return None if self.has_line(line) else look()

    async def wait_for(
        self,
        look: Callable[[], _State | None],
        deadline: Deadline,
        what: Callable[[], str],
        *,
        line: Hashable = None,
        give_back: Callable[[_State], None] | None = None,
    ) -> _State:
        """Returns the first result of ``look`` that is not None; looks at once, and after every ``wake``.

        Args:
            look: Also grants what it finds, if that must be nobody else's.
            line: Names callers that wait for the same: one is served after the other. None: a line of its own.
            give_back: Takes back what was granted in the moment in which the caller was cancelled.

        Raises:
            DeadlineExceededError: There was none in time; ``what`` says what was waited for, and why.
            StoreNotFoundError: The store was deleted.
        """
        state = self.at_once(look, line)
        if state is not None:
            return state
        if deadline.expired:
            raise _too_late(deadline, what)
        loop = asyncio.get_running_loop()
        waiter: _Waiter[_State] = _Waiter(look, loop.create_future())
        own = object() if line is None else line
        self._lines.setdefault(own, {})[waiter] = None
        self._num_waiting += 1
        if self.on_wait is not None:
            self.on_wait()
            self.wake()
        remaining_s = deadline.remaining_s
        timer = None if remaining_s is None else loop.call_later(remaining_s, self._expire, waiter)
        try:
            found = await waiter.future
        except asyncio.CancelledError:
            future = waiter.future
            is_over = future.done() and not future.cancelled() and future.exception() is None
            granted = future.result() if is_over else None
            if give_back is not None and granted is not None:
                give_back(granted)
                self.wake()
            raise
        finally:
            if timer is not None:
                timer.cancel()
            self._step_out(own, waiter)
        if found is None:
            raise _too_late(deadline, what)
        return found

    def _look(self) -> None:
        for _ in range(MAX_LOOKS):
            if not self._left:
                if not self._is_changed:
                    self._is_looking = False
                    return
                self._is_changed = False
                self._left.extend(self._lines.values())
                continue
            line = self._left[0]
            first = next(iter(line), None)
            if first is None or not self._serve(first):
                self._left.popleft()
                continue
            if line.pop(first, self) is None:
                self._num_waiting -= 1
            self._is_changed = True  # what one is granted may be what another, in a line before, waits for
        asyncio.get_running_loop().call_soon(self._look)

    def _serve(self, waiter: _Waiter[Any]) -> bool:
        """Whether this one has no more to wait for."""
        if waiter.future.done():
            return True
        try:
            self.check_present()
            state = waiter.look()
        except Exception as error:  # noqa: BLE001 (its own: the others go on)
            waiter.future.set_exception(error)
            return True
        if state is None:
            return False
        waiter.future.set_result(state)
        return True

    def _expire(self, waiter: _Waiter[Any]) -> None:
        if not self._serve(waiter):  # looked at once more: the state may have changed in the last moment
            waiter.future.set_result(None)

    def _step_out(self, own: Hashable, waiter: _Waiter[Any]) -> None:
        line = self._lines.get(own)
        if line is None:
            return
        was_first = next(iter(line), None) is waiter
        if line.pop(waiter, self) is None:
            self._num_waiting -= 1
        if not line:
            del self._lines[own]
        elif was_first:
            self.wake()


def _too_late(deadline: Deadline, what: Callable[[], str]) -> DeadlineExceededError:
    timeout_s = deadline.timeout_s  # the client's, less what the way here took
    return DeadlineExceededError(what=what(), timeout_s=None if timeout_s is None else round(timeout_s, 2))
