"""Calls that give a silent server up before their deadline, since other servers can take its place."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from threading import local

_of_thread = local()


@dataclass(frozen=True)
class Reach:
    """How long a call tries to reach its server.

    Attributes:
        seconds: From the first failure on.
        is_for_unsent: Whether that holds only for a call that no attempt has sent: of any other the outcome is unknown,
            and only a retry at the same server finds it out.
    """

    seconds: float
    is_for_unsent: bool

    def is_over(self, failed_s: float, *, was_sent: bool) -> bool:
        """Returns whether to give up a call that has failed since a reading of ``time.monotonic``."""
        return not (self.is_for_unsent and was_sent) and time.monotonic() - failed_s >= self.seconds


@contextmanager
def reach_within(seconds: float, *, is_for_unsent: bool = False) -> Iterator[None]:
    """Runs a block whose calls, as far as this thread makes them, give a silent server up; arguments as of Reach."""
    outer = get_reach()
    _of_thread.reach = Reach(seconds, is_for_unsent)
    try:
        yield
    finally:
        _of_thread.reach = outer


def get_reach() -> Reach | None:
    """Returns how long the calls of this thread try to reach their server; None: until their deadlines."""
    found: Reach | None = getattr(_of_thread, "reach", None)
    return found
