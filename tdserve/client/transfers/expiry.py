"""Ends writes with an early return whose time is over: nobody may be waiting for them."""

from __future__ import annotations

import logging
import os
import time
from threading import Condition, Thread
from typing import Protocol

_log = logging.getLogger("tdserve.client")

CHECK_S = 0.05
"""Time between two looks at what is watched: a write ends that much later than it must."""

IDLE_S = 5.0
"""Time for which the thread waits for more before it ends."""


class Watched(Protocol):
    """Writes of which some may be late."""

    def end_late(self, now_s: float) -> None:
        """Ends those whose time is over at this reading of ``time.monotonic``; must not block for long."""

    def is_finished(self) -> bool:
        """Returns whether all have ended; whoever adds one afterwards calls ``ExpiryWatch.watch`` again."""


class ExpiryWatch:
    """Looks for writes that are late, in a thread of its own that lives while there are writes. Threads: safe."""

    def __init__(self) -> None:
        self._begin()

    def _begin(self) -> None:
        self._pid = os.getpid()
        self._changed = Condition()
        self._watched: dict[int, Watched] = {}
        self._has_thread = False

    def watch(self, writes: Watched) -> None:
        """Looks at these writes until all have ended."""
        if self._pid != os.getpid():  # a forked child, which has no thread yet
            self._begin()
        with self._changed:
            self._watched[id(writes)] = writes
            if self._has_thread:
                self._changed.notify()
                return
            self._has_thread = True
            Thread(target=self._run, name="tdserve-expiry", daemon=True).start()

    def _run(self) -> None:
        while True:
            with self._changed:
                if not self._watched and not self._changed.wait(IDLE_S):
                    self._has_thread = False
                    return
                self._watched = {key: each for key, each in self._watched.items() if not each.is_finished()}
                watched = list(self._watched.values())
            for each in watched:
                try:
                    each.end_late(time.monotonic())
                except Exception:  # noqa: BLE001 (outermost frame: the others are still watched)
                    _log.exception("writes whose time was over could not be ended")
            del watched
            time.sleep(CHECK_S)


EXPIRY = ExpiryWatch()
