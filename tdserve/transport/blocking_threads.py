"""Runs blocking calls that cannot be interrupted in separate threads, so that their callers can be released."""

from __future__ import annotations

from collections.abc import Callable
from queue import SimpleQueue
from threading import Lock, Thread

_Outcome = BaseException | bool
_RETURNED, _LET_GO = True, False


class BlockingThreads:
    """Threads for the blocking calls of one channel: made on demand, reused, ended by ``close``.

    Args:
        name: Name of the threads.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = Lock()
        self._is_closed = False
        self._idle: list[_BlockingThread] = []
        self._outcomes: set[SimpleQueue[_Outcome]] = set()

    def wait(self, block: Callable[[], object]) -> bool:
        """Calls ``block`` in one of the threads and waits for its end; takes about 50 microseconds longer than the
        call.

        Returns:
            Whether ``block`` has returned. False if ``close`` came first: then ``block`` may continue unobserved.

        Raises:
            BaseException: What ``block`` raised.
        """
        outcome: SimpleQueue[_Outcome] = SimpleQueue()
        with self._lock:
            if self._is_closed:
                return _LET_GO
            self._outcomes.add(outcome)
            waiter = self._idle.pop() if self._idle else _BlockingThread(self._name)
        waiter.calls.put((block, outcome))
        found = outcome.get()
        with self._lock:
            self._outcomes.discard(outcome)
            if self._is_closed:
                waiter.calls.put(None)
            else:
                self._idle.append(waiter)
        if isinstance(found, BaseException):
            raise found
        return found

    def close(self) -> None:
        """Releases every caller and ends the threads, each when its call has ended. Idempotent."""
        with self._lock:
            self._is_closed = True
            idle, self._idle = self._idle, []
            outcomes = list(self._outcomes)
        for outcome in outcomes:
            outcome.put(_LET_GO)
        for waiter in idle:
            waiter.calls.put(None)


class _BlockingThread(Thread):
    def __init__(self, name: str) -> None:
        super().__init__(name=name, daemon=True)
        self.calls: SimpleQueue[tuple[Callable[[], object], SimpleQueue[_Outcome]] | None] = SimpleQueue()
        self.start()

    def run(self) -> None:
        while (call := self.calls.get()) is not None:
            block, outcome = call
            try:
                block()
                outcome.put(_RETURNED)
            except BaseException as error:  # noqa: BLE001 (outermost frame of the thread: its caller gets it)
                outcome.put(error)
            del call, block, outcome  # they keep memory alive
