"""Lets a role that runs by itself bear a server that is away: it tries again until nothing succeeded for too long."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

from tdserve.base.errors import DeadlineExceededError, ServerBusyError, TransportError

BORNE = (TransportError, DeadlineExceededError, ServerBusyError)
"""The errors of a server that restarts, of a network that is cut, or of partners that are not there yet."""

PAUSE_S = 0.5
"""The pause between two attempts. Most of the time passes in the calls themselves."""

LINE_INTERVAL_S = 5.0
"""The time between two lines that say what the role waits for: a log wants few."""

_Result = TypeVar("_Result")


class Patience:
    """Counts the seconds since anything succeeded. Threads: one.

    Args:
        limit_s: The longest time without any success.
        say: Prints the lines that say what the role waits for.
        clock: Returns seconds on a clock that never goes back.
    """

    def __init__(
        self, limit_s: float, *, say: Callable[[str], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._limit_s = limit_s
        self._say = say
        self._clock = clock
        self._last_s = clock()
        self._said_s = -LINE_INTERVAL_S

    def renew(self) -> None:
        """Counts from now on: something succeeded."""
        self._last_s = self._clock()

    def bear(self, error: Exception) -> None:
        """Pauses after a failure. Call it in the ``except`` clause of the failure.

        Raises:
            Exception: The failure itself, when nothing succeeded for too long, or when another attempt cannot help.
        """
        now_s = self._clock()
        is_hopeless = isinstance(error, TransportError) and not error.retryable
        if is_hopeless or now_s - self._last_s > self._limit_s:
            raise error
        if now_s - self._said_s >= LINE_INTERVAL_S:
            self._said_s = now_s
            self._say(f"trying again for {self._limit_s - (now_s - self._last_s):.0f} s more: {error}")
        time.sleep(PAUSE_S)

    def call(self, work: Callable[[], _Result]) -> _Result:
        """Calls ``work`` until it succeeds, and returns its result.

        Raises:
            TDServeError: The error is none of ``BORNE``, or nothing succeeded for too long.
        """
        while True:
            try:
                result = work()
            except BORNE as error:
                self.bear(error)
            else:
                self.renew()
                return result
