"""Time and chance of a simulation: a clock that moves when nothing else can happen, and numbers that follow from a
seed.

``install`` replaces the sources of both in this process, before tdserve is imported: what it binds at its import is the
replacement.
"""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections import deque
from collections.abc import Callable
from contextvars import copy_context
from heapq import heappop, heappush
from itertools import count
from typing import Any

_set_running_loop = vars(asyncio.events)["_set_running_loop"]  # asyncio exports it for event loops like the one here

EPOCH_S = 1_000_000_000.0
"""What the clock of the day shows at the beginning."""


class WouldWaitError(BaseException):
    """Raised where a thread would sleep until something else happens. Its work is done again a little later."""


class StuckError(AssertionError):
    """Nothing can happen any more, and somebody still waits."""


class Clock:
    """Seconds since the beginning of the simulation."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def read(self) -> float:
        """Returns the monotonic time."""
        return self.now_s

    def read_day(self) -> float:
        """Returns the time of the day."""
        return EPOCH_S + self.now_s


clock = Clock()
chance = random.Random(0)
"""The source of all random numbers but those of numpy, which seeds itself from it."""


def install() -> None:
    """Replaces the clocks, ``sleep`` and the system's random numbers in this process."""

    def sleep(seconds: Any) -> None:
        raise WouldWaitError

    time.monotonic, time.time, time.sleep = clock.read, clock.read_day, sleep
    time.perf_counter = clock.read
    os.urandom = chance.randbytes
    vars(random)["_urandom"] = chance.randbytes  # what ``secrets`` and numpy's seeds come from


async def pause(seconds: float) -> None:
    """Lets so much time of the simulation pass."""
    loop = asyncio.get_running_loop()
    over = loop.create_future()
    timer = loop.call_later(seconds, lambda: None if over.done() else over.set_result(None))
    try:
        await over
    finally:
        timer.cancel()


class _Handle:
    """A callback that is to run. What it holds is freed when it is cancelled: until its time comes it stays in line."""

    __slots__ = ("_what", "at_s")

    def __init__(self, callback: Callable[..., Any], arguments: tuple[Any, ...], context: Any, at_s: float) -> None:
        self._what: Any = (callback, arguments, context or copy_context())
        self.at_s = at_s

    def cancel(self) -> None:
        self._what = None

    def cancelled(self) -> bool:
        return self._what is None

    def when(self) -> float:
        return self.at_s

    def run(self) -> None:
        if self._what is not None:
            callback, arguments, context = self._what
            context.run(callback, *arguments)


class VirtualServer:
    """A listening socket to which nobody connects."""

    async def start_serving(self) -> None:
        """Does nothing."""

    def close(self) -> None:
        """Does nothing."""


class VirtualLoop(asyncio.BaseEventLoop):
    """An event loop in virtual time without sockets, whose turns cost a fraction of those of asyncio's own.

    What is meant for a thread runs between two callbacks, a random moment later. An error that a callback raises ends
    ``run_until_complete``.
    """

    def __init__(self, choose_delay_s: Callable[[], float]) -> None:
        super().__init__()
        self._choose_delay_s = choose_delay_s
        self._due: deque[_Handle] = deque()
        self._timers: list[tuple[float, int, _Handle]] = []
        self._order = count()

    def run_until_complete(self, future: Any) -> Any:
        """Runs callbacks until a future is done; the clock moves when there are no others.

        Raises:
            StuckError: Nothing can happen any more.
        """
        awaited = asyncio.ensure_future(future, loop=self)
        due, timers = self._due, self._timers
        _set_running_loop(self)
        try:
            while not awaited.done():
                if due:
                    due.popleft().run()
                elif timers:
                    at_s, _, handle = heappop(timers)
                    if not handle.cancelled():
                        clock.now_s = max(clock.now_s, at_s)
                        handle.run()
                else:
                    raise StuckError("somebody waits, and nothing can happen any more")
        finally:
            _set_running_loop(None)
        return awaited.result()

    def time(self) -> float:
        """Returns the time of the clock."""
        return clock.now_s

    def call_soon(self, callback: Any, *args: Any, context: Any = None) -> Any:  # type: ignore[override]
        """Has a callback run when all that are ready now have run."""
        handle = _Handle(callback, args, context, clock.now_s)
        self._due.append(handle)
        return handle

    call_soon_threadsafe = call_soon  # type: ignore[assignment]

    def call_at(self, when: float, callback: Any, *args: Any, context: Any = None) -> Any:  # type: ignore[override]
        """Has a callback run at a time of the clock."""
        handle = _Handle(callback, args, context, when)
        heappush(self._timers, (when, next(self._order), handle))
        return handle

    def call_later(self, delay: float, callback: Any, *args: Any, context: Any = None) -> Any:  # type: ignore[override]
        """Has a callback run so many seconds later."""
        return self.call_at(clock.now_s + delay, callback, *args, context=context)

    def run_in_executor(self, executor: Any, func: Any, *args: Any) -> Any:  # type: ignore[override]
        """Calls a function a little later."""
        done = self.create_future()

        def run() -> None:
            try:
                result = func(*args)
            except Exception as error:  # noqa: BLE001 (its caller gets it)
                if not done.cancelled():
                    done.set_exception(error)
            else:
                if not done.cancelled():
                    done.set_result(result)

        self.call_later(self._choose_delay_s(), run)
        return done

    async def create_unix_server(self, *_arguments: Any, **_named: Any) -> Any:
        """Returns a server to which nobody connects."""
        return VirtualServer()

    def add_reader(self, fd: Any, callback: Any, *args: Any) -> None:  # type: ignore[override]
        """Does nothing: nobody sends to what the server reads from."""

    def remove_reader(self, fd: Any) -> bool:
        """Does nothing."""
        return False

    def close(self) -> None:
        """Forgets all callbacks."""
        self._due.clear()
        self._timers.clear()
        super().close()
