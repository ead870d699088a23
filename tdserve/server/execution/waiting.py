"""Coroutines that wait for a state to change. They hold no thread, and ten thousand in a line make no change slower.

Coroutines that wait for the same thing form a line. After a change only the first of each
line looks; the next one does so once the first has got what it waited for.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from tdserve.base.deadline import Deadline
from tdserve.base.errors import DeadlineExceededError, StoreMovedError, StoreNotFoundError, TDServeError

_State = TypeVar("_State")


def retrieve_exception(task: asyncio.Future[Any]) -> None:
    """Retrieves the exception of a task that is not awaited, so that asyncio does not report it; a callback."""
    if not task.cancelled():
        task.exception()


async def wait_any(events: Iterable[asyncio.Event], *, timeout_s: float | None = None) -> bool:
    """Waits until one of some events is set; returns whether one was, in time."""
    waits = [asyncio.ensure_future(event.wait()) for event in events]
    try:
        done, _ = await asyncio.wait(waits, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits:
            wait.cancel()
    return bool(done)


MAX_ATTEMPTS = 256
"""Most attempts in one turn of the event loop, so that others get their turn: one takes a few microseconds."""


@dataclass(eq=False)
class _Waiter(Generic[_State]):
    attempt: Callable[[], _State | None]
    future: asyncio.Future[_State | None]
    begun_s: float = field(default_factory=time.monotonic)


@dataclass
class WaitTally:
    """The waits of one kind: those that have begun, the time of those that have ended, and those of now."""

    num_waits: int = 0
    sum_s: float = 0.0
    num_waiting: int = 0


OTHER_WAIT = "other"
"""Kind of the waits that are in no line with a kind."""

_WAIT_KINDS = {"sample": "sample", "share": "sample", "extend": "extend"}
"""The first words of lines, and the kinds of their waits."""


class Waiters:
    """The waiters for one thing (a store, its rows, its newest version) to change.

    Attributes:
        on_wait: Called when a coroutine begins to wait; the coroutine tries once more afterwards.
        tallies: The waits by kind: that of calls for rows, or for room for them, is the first word of their line.
    """

    def __init__(self) -> None:
        self.on_wait: Callable[[], None] | None = None
        self.tallies: dict[str, WaitTally] = {}
        self._lines: dict[Hashable, dict[_Waiter[Any], None]] = {}  # waiters of each line, in order
        self._num_waiting = 0
        self._is_serving = False
        self._is_changed = False  # since the last round over the lines began
        self._left: deque[dict[_Waiter[Any], None]] = deque()  # lines that this round has not reached
        self._gone: TDServeError | None = None
        self._seal: StoreMovedError | None = None
        self._is_at_rest = False
        self._deferred: list[Callable[[], None]] = []  # to be called when the seal ends

    def wake(self) -> None:
        """Lets waiters try again soon; several changes in one turn of the loop count as one."""
        self._is_changed = True
        if self._lines and not self._is_serving:
            self._is_serving = True
            asyncio.get_running_loop().call_soon(self._serve_lines)

    def delete(self, name: str) -> None:
        """Ends all waits, present and future, with StoreNotFoundError: the store ``name`` was deleted."""
        self._end(StoreNotFoundError(name=name))

    def retire(self, name: str) -> None:
        """Ends all waits, present and future, with StoreMovedError: the store ``name`` has moved to another server, or
        another object has taken its place here."""
        self._end(StoreMovedError(name=name))

    def begin_seal(self, name: str) -> None:
        """Ends all waits with StoreMovedError, until ``end_seal``: the store ``name`` is being brought to rest. What
        has been decided before is still carried out, for the seal waits for it."""
        self._seal = StoreMovedError(name=name)
        self.wake()

    def begin_rest(self) -> None:
        """Notes that a sealed store is at rest: from now on nothing in its files changes, until ``end_seal``."""
        self._is_at_rest = True

    def end_seal(self) -> None:
        """Ends ``begin_seal``: the store serves again."""
        self._seal, self._is_at_rest = None, False
        deferred, self._deferred = self._deferred, []
        for work in deferred:
            asyncio.get_running_loop().call_soon(work)

    def defer(self, work: Callable[[], None]) -> None:
        """Calls ``work`` when the seal of a store at rest ends; never if the store does not come back."""
        self._deferred.append(work)

    def _end(self, reason: TDServeError) -> None:
        self._gone, self._deferred = reason, []
        self.wake()

    @property
    def is_deleted(self) -> bool:
        """Whether ``delete`` was called."""
        return isinstance(self._gone, StoreNotFoundError)

    @property
    def is_gone(self) -> bool:
        """Whether nothing more is done for the store, not even what was decided: ``delete`` or ``retire`` was
        called."""
        return self._gone is not None

    @property
    def is_at_rest(self) -> bool:
        """Whether the store is sealed, and nothing in its files may change."""
        return self._is_at_rest

    @property
    def is_away(self) -> bool:
        """Whether nothing more is begun for the store now: it is gone, or sealed."""
        return self._gone is not None or self._seal is not None

    def check_present(self) -> None:
        """Raises StoreNotFoundError after ``delete``, and StoreMovedError after ``retire`` or during a seal."""
        self.check_not_gone()
        if self._seal is not None:
            raise StoreMovedError(**self._seal.fields)

    def check_not_gone(self) -> None:
        """Like ``check_present`` for what has begun before a seal, which waits for its end."""
        if self._gone is not None:
            raise type(self._gone)(**self._gone.fields)

    @property
    def num_waiting(self) -> int:
        """Number of coroutines that wait now."""
        return self._num_waiting

    def find_longest_s(self, kind: str) -> float:
        """Returns for how long the first of those that wait now has waited; 0.0 if none of this kind does."""
        lines = (line for own, line in self._lines.items() if _find_wait_kind(own) == kind)
        begun = [next(iter(line)).begun_s for line in lines if line]
        return time.monotonic() - min(begun) if begun else 0.0

    def has_line(self, line: Hashable) -> bool:
        """Returns whether a request waits in this line, so that a newcomer has to queue."""
        return bool(self._lines.get(line))  # empty: the last was served and has not resumed yet

    def attempt_at_once(self, attempt: Callable[[], _State | None], line: Hashable) -> _State | None:
        """Returns what ``attempt`` returns, or None if a request waits in line for it; arguments as for
        ``wait_for``."""
        self.check_present()
        return None if self.has_line(line) else attempt()

    async def wait_for(
        self,
        attempt: Callable[[], _State | None],
        deadline: Deadline,
        what: Callable[[], str],
        *,
        line: Hashable = None,
        give_back: Callable[[_State], None] | None = None,
    ) -> _State:
        """Returns the first result of ``attempt`` that is not None; calls it at once, and after every ``wake``.

        Args:
            attempt: Takes what the caller waits for and returns it; None if it is not there.
            deadline: End of the wait.
            what: Describes, for the error, what is waited for and why it is not there.
            line: Identifies callers that wait for the same thing and are served one after the other. None: a line of
                its own.
            give_back: Takes back what an attempt has returned, if the caller was cancelled in that moment.

        Raises:
            DeadlineExceededError: There was no state in time.
            StoreNotFoundError: The store was deleted.
            StoreMovedError: The store is sealed, or is elsewhere now.
        """
        state = self.attempt_at_once(attempt, line)
        if state is not None:
            return state
        if deadline.expired:
            raise _make_deadline_error(deadline, what)
        loop = asyncio.get_running_loop()
        waiter: _Waiter[_State] = _Waiter(attempt, loop.create_future())
        own = object() if line is None else line
        self._lines.setdefault(own, {})[waiter] = None
        self._num_waiting += 1
        tally = self.tallies.setdefault(_find_wait_kind(line), WaitTally())
        tally.num_waits += 1
        tally.num_waiting += 1
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
            taken = future.result() if is_over else None
            if give_back is not None and taken is not None:
                give_back(taken)
                self.wake()
            raise
        finally:
            if timer is not None:
                timer.cancel()
            tally.num_waiting -= 1
            tally.sum_s += time.monotonic() - waiter.begun_s
            self._step_out(own, waiter)
        if found is None:
            raise _make_deadline_error(deadline, what)
        return found

    def _serve_lines(self) -> None:
        for _ in range(MAX_ATTEMPTS):
            if not self._left:
                if not self._is_changed:
                    self._is_serving = False
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
            self._is_changed = True  # what was just taken may be what an earlier line waits for
        asyncio.get_running_loop().call_soon(self._serve_lines)

    def _serve(self, waiter: _Waiter[Any]) -> bool:
        """Lets a waiter try; returns whether it is done."""
        if waiter.future.done():
            return True
        try:
            self.check_present()
            state = waiter.attempt()
        except Exception as error:  # noqa: BLE001 (it concerns this waiter alone)
            waiter.future.set_exception(error)
            return True
        if state is None:
            return False
        waiter.future.set_result(state)
        return True

    def _expire(self, waiter: _Waiter[Any]) -> None:
        if not self._serve(waiter):  # the state may have changed just now
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


def _find_wait_kind(line: Hashable) -> str:
    return _WAIT_KINDS.get(line[0], OTHER_WAIT) if isinstance(line, tuple) and line else OTHER_WAIT


def _make_deadline_error(deadline: Deadline, what: Callable[[], str]) -> DeadlineExceededError:
    timeout_s = deadline.timeout_s  # the client's, less the time in transit
    return DeadlineExceededError(what=what(), timeout_s=None if timeout_s is None else round(timeout_s, 2))
