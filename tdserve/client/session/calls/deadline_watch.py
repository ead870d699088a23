"""Ends what no thread waits for when its time is up."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable
from threading import Condition, Thread

IDLE_S = 60.0
"""The thread looks this often whether anything is left to watch; it ends if nothing is."""


class DeadlineWatch:
    """Calls back when the time of something is up. Threads: safe.

    One thread, which runs while there is something to watch, serves all of a client. Adding and removing wake it only
    for a time that comes before all others: a client may do both thousands of times per second.
    """

    def __init__(self) -> None:
        self._numbers = itertools.count(1)
        self._watched: dict[int, tuple[float, Callable[[], None]]] = {}
        self._sooner = Condition()
        self._wakes_at_s = math.inf
        self._is_running = False
        self._is_closed = False

    def add(self, timeout_s: float | None, on_over: Callable[[], None]) -> int:
        """Watches one thing, and returns its number for ``remove``.

        Args:
            timeout_s: Seconds from now; None is never.
            on_over: Called once in the watching thread, unless it was removed before. Must not raise, and should not
                take long.
        """
        number = next(self._numbers)
        if timeout_s is None:
            return number
        at_s = time.monotonic() + timeout_s
        with self._sooner:
            self._watched[number] = at_s, on_over
            if not self._is_running:
                self._is_running = True
                Thread(target=self._run, name="tdserve-deadlines", daemon=True).start()
            elif at_s < self._wakes_at_s:
                self._sooner.notify()
        return number

    def remove(self, number: int) -> None:
        """Watches it no longer. It may be over already."""
        with self._sooner:
            self._watched.pop(number, None)
            if self._is_closed:
                self._sooner.notify()

    def close(self) -> None:
        """Ends the thread as soon as nothing is watched any more, instead of within ``IDLE_S``. Idempotent."""
        with self._sooner:
            self._is_closed = True
            self._sooner.notify()

    def _run(self) -> None:
        while True:
            with self._sooner:
                now_s = time.monotonic()
                over = [number for number, (at_s, _) in self._watched.items() if at_s <= now_s]
                calls = [self._watched.pop(number)[1] for number in over]
                if not calls:
                    if not self._watched:
                        self._is_running = False
                        return
                    self._wakes_at_s = min(at_s for at_s, _ in self._watched.values())
                    self._sooner.wait(min(self._wakes_at_s - now_s, IDLE_S))
                    continue
            for call in calls:
                call()
