"""A queue for one reader whose waits end in time."""

from __future__ import annotations

import time
from collections import deque
from threading import Lock
from typing import Generic, TypeVar

T = TypeVar("T")


class TimedQueue(Generic[T]):
    """Passes objects to one thread at a time, in order.

    ``queue.SimpleQueue.get`` of CPython up to 3.12 may wait for ever: when it was woken without an object, by a signal
    for example, it computes what is left of its time, and takes a negative rest for "without end". So it waits for ever
    after a signal whose handler takes longer than the rest.

    Threads: any may put; one gets at a time. A forked child may put: a plain lock has no owner.
    """

    def __init__(self) -> None:
        self._items: deque[T] = deque()
        self._came = Lock()  # held while there is nothing to get, or nothing was looked for yet
        self._came.acquire()

    def put(self, item: T) -> None:
        """Adds an object; does not wait."""
        self._items.append(item)
        try:  # noqa: SIM105 (a context manager would double the time of a put)
            self._came.release()
        except RuntimeError:  # the reader has not taken the one before
            pass

    def get_now(self) -> T | None:
        """Returns the next object, None if there is none."""
        return self._items.popleft() if self._items else None

    def get(self, timeout_s: float) -> T | None:
        """Returns the next object as soon as there is one; None if there was none in time."""
        if self._items:
            return self._items.popleft()
        end_s = time.monotonic() + timeout_s
        remaining_s = timeout_s
        while self._came.acquire(timeout=max(remaining_s, 0.0)):
            if self._items:
                return self._items.popleft()
            remaining_s = end_s - time.monotonic()  # an object that was taken before had released the lock
        return None
