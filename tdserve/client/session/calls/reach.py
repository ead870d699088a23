"""Calls that give a silent server up before their deadline, since other servers can take its place."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from threading import local

from tdserve.base.addresses import explain_unreachable

SILENT_S = 18.0
"""How long a server may listen and not answer, as on a busy machine: as long as a connection without a sign of life is
kept."""

_of_thread = local()


@dataclass(frozen=True)
class Reach:
    """How long a call tries to reach its server.

    Attributes:
        seconds: From the first failure on, if its port is closed; otherwise ``SILENT_S``.
        is_for_unsent: Whether that does not hold for a change that an attempt has sent: its outcome is unknown, and
            only a retry at the same server finds it out.
    """

    seconds: float
    is_for_unsent: bool = False

    def is_over(self, address: str, failed_s: float, *, is_unknown: bool) -> bool:
        """Returns whether to give up a call that has failed since a reading of ``time.monotonic``.

        Args:
            is_unknown: Whether it may have changed something.
        """
        elapsed_s = time.monotonic() - failed_s
        if elapsed_s < self.seconds or (self.is_for_unsent and is_unknown):
            return False
        return elapsed_s >= max(SILENT_S, self.seconds) or bool(explain_unreachable(address))


_UNLIMITED = Reach(math.inf)


@contextmanager
def reach_within(seconds: float, *, is_for_unsent: bool = False) -> Iterator[None]:
    """Runs a block whose calls, as far as this thread makes them, give a silent server up; arguments as in Reach."""
    outer = get_reach()
    _of_thread.reach = Reach(seconds, is_for_unsent)
    try:
        yield
    finally:
        _of_thread.reach = outer


def is_patient() -> bool:
    """Returns whether the calls of this thread try to reach their server until their deadlines."""
    return get_reach().seconds == math.inf


def get_reach() -> Reach:
    """Returns how long the calls of this thread try to reach their server; without a limit, until their deadlines."""
    found: Reach = getattr(_of_thread, "reach", _UNLIMITED)
    return found
