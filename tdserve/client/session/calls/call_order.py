"""The order of a client's calls that return early, where each replaces what the one before has written."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, TimeoutError as WaitTimeoutError
from threading import Lock

from tdserve.base.deadline import Deadline
from tdserve.base.errors import DeadlineExceededError


class CallOrder:
    """Runs the jobs of each store one after the other, in the order in which they were given.

    Threads: safe. No thread waits for a job before it.
    """

    def __init__(self) -> None:
        self._last: dict[str, Future[None]] = {}
        self._lock = Lock()

    def run(self, name: str, submit: Callable[[], Future[None]]) -> None:
        """Submits a job as soon as those before it about this store have ended, however they have.

        Args:
            submit: Begins the job in another thread; returns the future of its end.
        """
        ended: Future[None] = Future()
        with self._lock:
            before = self._last.get(name)
            self._last[name] = ended

        def end(_: object) -> None:
            with self._lock:
                if self._last.get(name) is ended:
                    del self._last[name]
            ended.set_result(None)

        def begin(_: object) -> None:
            submit().add_done_callback(end)

        if before is None:
            begin(None)
        else:
            before.add_done_callback(begin)

    def wait(self, name: str, deadline: Deadline) -> None:
        """Waits until the jobs about this store have ended.

        Raises:
            DeadlineExceededError: They have not in time.
        """
        last = self._last.get(name)
        if last is None:
            return
        try:
            last.result(deadline.remaining_s)
        except WaitTimeoutError:
            what = f"the end of earlier calls about store {name!r} that return early"
            raise DeadlineExceededError(what=what, timeout_s=deadline.timeout_s) from None
