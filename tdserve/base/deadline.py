"""A point in monotonic time, so that one timeout covers all steps of a call. Waits for nothing itself."""

from __future__ import annotations

import math
import numbers
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

from tdserve.base.errors import DeadlineExceededError, InvalidRequestError

GRACE_S = 0.4
"""Seconds beyond a call's deadline for the answer of a server that is up: it ends waits at the deadline itself. A
server that is down is detected no sooner."""

ONCE_GRACE_S = 2.0
"""The same for a call that asks once without waiting: all the time that it has, even if the server is busy."""


NEAR_SHARE = 0.1
"""Deadlines that differ by no more than this share of a call's time count as one."""


def compute_grace_s(timeout_s: float | None) -> float:
    """Returns how long beyond its deadline a call waits for the answer, given the caller's ``timeout_s``."""
    return ONCE_GRACE_S if timeout_s == 0 else GRACE_S


@dataclass(frozen=True)
class Deadline:
    """When a call must have ended. Created once at the start of the call and passed to every step.

    Attributes:
        at_s: Reading of ``clock`` at which the time is up, seconds; ``None`` is never.
        timeout_s: What the caller asked for, seconds, for error messages; ``None`` is no limit.
        clock: Seconds on a clock that never goes back.
    """

    at_s: float | None
    timeout_s: float | None
    clock: Callable[[], float] = time.monotonic

    never: ClassVar[Deadline]

    @classmethod
    def after(cls, timeout_s: float | None, clock: Callable[[], float] = time.monotonic) -> Deadline:
        """Returns a deadline this far from now. ``None`` and infinity never end; 0 is expired at once, and asks once.

        Raises:
            InvalidRequestError: ``timeout_s`` is negative, NaN, or no number.
        """
        if timeout_s is None:
            return cls(None, None, clock)
        seconds = _convert_seconds(timeout_s)
        if math.isinf(seconds):
            return cls(None, None, clock)
        return cls(clock() + seconds, seconds, clock)

    @property
    def remaining_s(self) -> float | None:
        """Seconds left, never below 0; ``None`` when the deadline never comes."""
        if self.at_s is None:
            return None
        return max(0.0, self.at_s - self.clock())

    def limit(self, seconds: float) -> float:
        """Returns this many seconds, or those left if they are fewer: the length of one pause or step."""
        remaining_s = self.remaining_s
        return seconds if remaining_s is None else min(seconds, remaining_s)

    def shorten(self, seconds: float) -> Deadline:
        """Returns the deadline of a step that may take this many seconds, and no longer than the call."""
        remaining_s = self.remaining_s
        return Deadline.after(seconds, self.clock) if remaining_s is None or seconds < remaining_s else self

    @property
    def begun_s(self) -> float | None:
        """Reading of ``clock`` when it was made; ``None`` if it never comes."""
        return None if self.at_s is None or self.timeout_s is None else self.at_s - self.timeout_s

    @property
    def overdue_s(self) -> float:
        """Seconds since the time was up; 0 before."""
        return 0.0 if self.at_s is None else max(self.clock() - self.at_s, 0.0)

    @property
    def expired(self) -> bool:
        """Whether the time is up. A deadline that was 0 s away is expired from the start."""
        return self.at_s is not None and self.clock() >= self.at_s

    def is_long_before(self, other: Deadline) -> bool:
        """Returns whether it comes before another by more than a tenth of its call's time."""
        if self.at_s is None:
            return False
        return other.at_s is None or other.at_s - self.at_s > NEAR_SHARE * (self.timeout_s or 0.0)

    def is_near(self, other: Deadline) -> bool:
        """Returns whether the one that comes first may stand for both."""
        return not self.is_long_before(other) and not other.is_long_before(self)

    def raise_if_expired(self, what: str) -> None:
        """Raises when the time is up.

        Args:
            what: What did not happen, as in "a version above 3 of store 'policy'".

        Raises:
            DeadlineExceededError: The time is up. Nothing was changed by asking.
        """
        if self.expired:
            raise DeadlineExceededError(what=what, timeout_s=self.timeout_s)


def _convert_seconds(timeout_s: float) -> float:
    """Converts a number of seconds of any type, also NumPy's; a number too large for a float becomes infinity."""
    if type(timeout_s) is not float:
        if isinstance(timeout_s, bool) or not isinstance(timeout_s, numbers.Real):
            raise InvalidRequestError(argument="timeout_s", reason=f"{timeout_s!r} is not a number of seconds")
        try:
            timeout_s = float(timeout_s)
        except OverflowError:
            timeout_s = math.inf if timeout_s > 0 else -math.inf
    if not timeout_s >= 0:
        raise InvalidRequestError(argument="timeout_s", reason=f"{timeout_s:g} is not 0 s or more")
    return timeout_s


Deadline.never = Deadline(None, None)
