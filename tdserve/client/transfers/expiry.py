"""Ends writes with an early return whose time is over: nobody may be waiting for them."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from concurrent.futures import Future
from itertools import count
from threading import Condition, Thread
from typing import Any

CHECK_S = 0.05
"""Time between two looks at what is watched: a write ends that much later than it must."""

IDLE_S = 5.0
"""Time for which the thread waits for more before it ends."""


class ExpiryWatch:
    """Calls back for each future that is not done in its time. Threads: safe; all callbacks run in one thread, which
    lives while futures are watched."""

    def __init__(self) -> None:
        self._reset()

    def _reset(self) -> None:
        self._pid = os.getpid()
        self._changed = Condition()
        self._numbers = count()
        self._watched: dict[int, tuple[float, Callable[[], None]]] = {}
        self._has_thread = False

    def watch(self, future: Future[Any], timeout_s: float | None, expire: Callable[[], None]) -> None:
        """Calls ``expire`` once, soon after the timeout, unless the future is done by then.

        Args:
            timeout_s: None: never.
            expire: Must not block for long: others are watched by the same thread.
        """
        if timeout_s is None:
            return
        if self._pid != os.getpid():  # a forked child, which has no thread yet
            self._reset()
        with self._changed:
            number = next(self._numbers)
            self._watched[number] = time.monotonic() + timeout_s, expire
            if not self._has_thread:
                self._has_thread = True
                Thread(target=self._run, name="tdserve-expiry", daemon=True).start()
            elif len(self._watched) == 1:
                self._changed.notify()
        future.add_done_callback(lambda _: self._forget(number))

    def _forget(self, number: int) -> None:
        with self._changed:
            self._watched.pop(number, None)

    def _run(self) -> None:
        while True:
            with self._changed:
                if not self._watched and not self._changed.wait(IDLE_S):
                    self._has_thread = False
                    return
                now_s = time.monotonic()
                late = [number for number, (end_s, _) in self._watched.items() if end_s <= now_s]
                expired = [self._watched.pop(number)[1] for number in late]
            for expire in expired:
                expire()
            time.sleep(CHECK_S)


EXPIRY = ExpiryWatch()
