"""How a role that runs by itself bears a server that is not there: it tries again until nothing came for too long."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

from tdserve.base.errors import DeadlineExceededError, ServerBusyError, TransportError

BORNE = (TransportError, DeadlineExceededError, ServerBusyError)
"""What a server that starts again, a network that is cut, or partners that are not there yet look like."""

PAUSE_S = 0.5
"""Between two attempts; the calls themselves wait for most of the time."""

LINE_INTERVAL_S = 5.0
"""Between two lines that say what is waited for: a log wants few."""

_Result = TypeVar("_Result")


class Patience:
    """Counts the seconds since anything succeeded. Threads: one.

    Args:
        limit_s: So long without any success is borne.
        say: Takes the lines that say what is waited for.
        clock: Seconds on a clock that never goes back.
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
        """Something succeeded."""
        self._last_s = self._clock()

    def bear(self, error: Exception) -> None:
        """Takes a failure and pauses; to be called in its ``except`` clause.

        Raises:
            Exception: The failure itself, when nothing succeeded for too long, or when trying again does not help.
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
        """Calls until it succeeds.

        Raises:
            TDServeError: It is not one that is borne, or nothing succeeded for too long.
        """
        while True:
            try:
                result = work()
            except BORNE as error:
                self.bear(error)
            else:
                self.renew()
                return result
