"""Time and chance of a simulation: a clock that moves when nothing else can happen, and numbers that follow from a
seed.

``install`` replaces the sources of both in this process, before tdserve is imported: what it binds at its import is the
replacement.
"""

from __future__ import annotations

import asyncio
import os
import random
import selectors
import time
from collections.abc import Callable
from typing import Any

EPOCH_S = 1_000_000_000.0
"""What the clock of the day shows at the beginning."""


class WouldWaitError(BaseException):
    """A thread would sleep until something else happens; its work is to be done again a little later."""


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


class _VirtualSelector(selectors.DefaultSelector):
    """Looks at sockets, and moves the clock instead of waiting."""

    def select(self, timeout: float | None = None) -> Any:
        ready = super().select(0)
        if ready or timeout == 0:
            return ready
        if timeout is None:
            raise StuckError("somebody waits, and nothing can happen any more")
        clock.now_s += timeout
        return ready


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop in virtual time. What is meant for a thread runs between two callbacks, a random moment later."""

    def __init__(self, choose_delay_s: Callable[[], float]) -> None:
        super().__init__(_VirtualSelector())
        self._choose_delay_s = choose_delay_s

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
