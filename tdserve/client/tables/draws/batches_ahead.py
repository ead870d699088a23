"""Batches that a thread makes ahead of their use."""

from __future__ import annotations

import atexit
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from queue import Empty, Full, Queue
from threading import Event, Lock, Thread, current_thread
from typing import Any

from tdserve.base.deadline import Deadline
from tdserve.base.errors import ClosedError, DeadlineExceededError, EndOfStreamError
from tdserve.client.session.calls.call_deadline import get_call_deadline
from tdserve.client.session.calls.step_counts import StepCount
from tdserve.client.tables.draws.share import Share

JOIN_TIMEOUT_S = 5.0
"""Longest wait for the end of a thread whose requests were cancelled; it takes milliseconds if the server answers."""

POLL_S = 0.2
"""Longest time until a waiting thread notices that the iterator was closed."""


@dataclass
class _Passing:
    """The timeout of a wait, and when the last one came. The thread continues after it."""

    came_s: float
    error: BaseException


class BatchesAhead:
    """What an iterator and its thread share. It does not refer to the iterator, so that dropping that ends the thread.
    Threads: one puts, one takes, any may close.

    Args:
        name: Name of the table, for errors.
        max_batches: Most batches that wait.

    Attributes:
        closed: Set once nothing more is to be made.
    """

    def __init__(self, name: str, *, max_batches: int) -> None:
        self.closed = Event()
        self._name = name
        self._items: Queue[Any] = Queue(maxsize=max_batches)
        self._passing: _Passing | None = None  # which waits for its taker
        self._passing_lock = Lock()
        self._end: EndOfStreamError | None = None
        self._thread: Thread | None = None

    def start(self, make: Callable[[], None], end: Callable[[], None]) -> None:
        """Starts the thread.

        Args:
            make: What it runs.
            end: Closes, so that ``make`` returns soon; also called when the interpreter exits.
        """
        self._thread = Thread(target=_run, args=(make, end), name=f"tdserve-batches-{self._name}", daemon=True)
        self._thread.start()

    def put(self, item: Any) -> None:
        """Adds a batch, or an error that ``take`` raises, once there is room; does nothing when closed."""
        while not self.closed.is_set():
            try:
                self._items.put(item, timeout=POLL_S)
                return
            except Full:
                continue

    def put_passing(self, error: BaseException) -> None:
        """Adds the timeout of a wait. Only a call that was already waiting raises it.

        It replaces one that no call has raised; then the thread pauses.
        """
        with self._passing_lock:
            before, came = self._passing, _Passing(time.monotonic(), error)
            if before is None:
                self._passing = came
            else:
                before.came_s, before.error = came.came_s, error
        if before is None:
            self.put(came)
        else:
            self.closed.wait(POLL_S)

    def take(self, began_s: float) -> Any:
        """Returns the next batch; waits for it.

        Args:
            began_s: When the call for it began, on the monotonic clock.

        Raises:
            EndOfStreamError: The table has no more; from then on in each call.
            ClosedError: The iterator was closed, or an error that was raised before has ended the thread.
            DeadlineExceededError: The time of the block ``tdserve.within`` is over. The next call continues.
            TDServeError: What was put in the place of a batch.
        """
        limit = get_call_deadline() or Deadline.never
        while self._end is None:
            if self.closed.is_set():
                raise ClosedError(what=f"the iterator over batches of {self._name!r}")
            try:
                item = self._items.get(timeout=limit.limit(POLL_S))
            except Empty:
                if self._thread is None or not self._thread.is_alive():
                    raise ClosedError(what=f"the iterator over batches of {self._name!r}") from None
                limit.raise_if_expired(f"a batch of {self._name!r}")
                continue
            if isinstance(item, _Passing):
                with self._passing_lock:
                    self._passing = None
                if item.came_s >= began_s:
                    raise item.error
            elif isinstance(item, EndOfStreamError):
                self._end = item
            elif isinstance(item, BaseException):
                raise item
            else:
                return item
        raise self._end

    def join(self, timeout_s: float) -> None:
        """Waits for the end of the thread."""
        if self._thread is not None:
            self._thread.join(timeout_s)


def take_prefetched(step_count: StepCount | None, share: Share | None) -> bool:
    """Counts the step of a batch, if it is a share; returns False if the caller has had it elsewhere meanwhile."""
    if share is None or step_count is None:
        return True
    return step_count.take_prefetched(share.step, is_named=share.is_named)


def make_late_error(name: str, timeout_s: float) -> DeadlineExceededError:
    """Returns the error of a call that got only batches that had waited too long."""
    what = f"a batch of {name!r} that did not wait too long for its taker"
    return DeadlineExceededError(what=what, timeout_s=timeout_s)


_ENDS: dict[Thread, Callable[[], None]] = {}
"""What ends each running thread. One that receives content while the interpreter exits would abort the process
(measured)."""


os.register_at_fork(after_in_child=_ENDS.clear)  # these threads do not exist there, and their requests are the parent's


def _run(make: Callable[[], None], end: Callable[[], None]) -> None:
    _ENDS[current_thread()] = end
    try:
        make()
    finally:
        del _ENDS[current_thread()]


@atexit.register
def _end_all() -> None:
    running = dict(_ENDS)
    for end in running.values():
        end()
    for thread in running:
        thread.join(JOIN_TIMEOUT_S)
