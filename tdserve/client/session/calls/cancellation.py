"""Calls that another thread gives up: what they wait for on the server ends there, and so does the call."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Lock, local

_of_thread = local()


class Cancellation:
    """Of one call. Threads: one makes the call, any other cancels it.

    A request that waits on the server is given up there, and the call raises TransferAbortedError. One that already
    moves content continues to its end.
    """

    def __init__(self) -> None:
        self._lock = Lock()
        self._is_cancelled = False
        self._cancel_request: Callable[[], None] | None = None

    @property
    def is_cancelled(self) -> bool:
        """Whether the call was given up."""
        return self._is_cancelled

    def cancel(self) -> None:
        """Gives the call up."""
        with self._lock:
            self._is_cancelled = True
            cancel_request = self._cancel_request
        if cancel_request is not None:
            cancel_request()

    def follow(self, cancel_request: Callable[[], None]) -> None:
        """Takes note of the request that the call has sent last.

        Args:
            cancel_request: Asks the server to give it up.
        """
        with self._lock:
            self._cancel_request = cancel_request
            is_cancelled = self._is_cancelled
        if is_cancelled:
            cancel_request()

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Runs a block whose requests, as far as this thread sends them, belong to the call."""
        _of_thread.cancellation = self
        try:
            yield
        finally:
            _of_thread.cancellation = None


def get_cancellation() -> Cancellation | None:
    """Returns the cancellation of the call that this thread makes; None if it cannot be cancelled."""
    found: Cancellation | None = getattr(_of_thread, "cancellation", None)
    return found
