"""A client's calls that return early: they run in threads of its own."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from threading import Lock, Semaphore
from typing import Any, Generic, TypeVar

from tdserve.base.deadline import Deadline
from tdserve.base.errors import ClosedError, DeadlineExceededError
from tdserve.client.session.calls.awaitable_future import AwaitableFuture
from tdserve.client.session.calls.call_order import CallOrder
from tdserve.client.session.calls.call_traces import carry_context
from tdserve.client.session.calls.deadline_watch import DeadlineWatch
from tdserve.client.session.calls.timeouts import compute_answer_timeout_s

_Result = TypeVar("_Result")

MAX_THREADS = 4
"""Threads of one client. What waits longer, such as coalesced extends, holds none."""


class BackgroundCalls:
    """The threads of one client, made on demand.

    Threads: safe.

    Args:
        name: Name of the threads.

    Attributes:
        watch: Ends calls that return early when their time is over.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self.watch = DeadlineWatch()
        self._lock = Lock()
        self._executor: ThreadPoolExecutor | None = None
        self._order = CallOrder()

    def run(
        self, work: Callable[[], _Result], *, deadline: Deadline = Deadline.never, in_turn: str = ""
    ) -> AwaitableFuture[_Result]:
        """Runs work in one of the threads, also after ``close``: work that finds its client closed fails by itself, as
        all work does once the interpreter is exiting.

        Args:
            deadline: Deadline of the call, which the work observes itself: work that has not begun by then is not
                done, and its future fails with DeadlineExceededError.
            in_turn: Name of a store: the work begins when earlier work that was given this name has ended.
        """
        call = _Call(carry_context(work))
        future = call.future
        if deadline.at_s is not None:
            watched = self.watch.add(compute_answer_timeout_s(deadline), partial(call.expire, deadline))
            future.add_done_callback(lambda _: self.watch.remove(watched))
        submit = partial(self._submit, call)
        if in_turn:
            self._order.run(in_turn, submit)
        else:
            submit()
        return future

    def wait(self, name: str, deadline: Deadline) -> None:
        """Waits until the work that was given the name of this store has ended.

        Raises:
            DeadlineExceededError: It has not in time.
        """
        self._order.wait(name, deadline)

    def close(self) -> None:
        """Ends the threads, each when its work has ended. Idempotent."""
        with self._lock:
            executor, self._executor = self._executor, None
        if executor is not None:
            executor.shutdown(wait=False)
        self.watch.close()

    def _submit(self, call: _Call[Any]) -> Future[None]:
        with self._lock:
            if self._executor is None:
                self._executor = ThreadPoolExecutor(MAX_THREADS, thread_name_prefix=self._name)
            try:
                return self._executor.submit(call.begin)
            except RuntimeError:
                call.refuse(ClosedError(what="the interpreter is shutting down: the client"))
                return AwaitableFuture.make_done(None)


class _Call(Generic[_Result]):
    """Work that a thread begins, unless its time is over before. Threads: safe.

    Attributes:
        future: Gets its result.
    """

    def __init__(self, work: Callable[[], _Result]) -> None:
        self.future: AwaitableFuture[_Result] = AwaitableFuture()
        self._work = work
        self._is_free = Semaphore(1)

    def begin(self) -> None:
        """Does the work, if it was not refused before."""
        if self._is_free.acquire(blocking=False):
            self.future.run(self._work)

    def refuse(self, error: ClosedError | DeadlineExceededError) -> None:
        """Ends the future with an error, if the work has not begun."""
        if self._is_free.acquire(blocking=False) and self.future.set_running_or_notify_cancel():
            self.future.set_exception(error)

    def expire(self, deadline: Deadline) -> None:
        """Ends the future, since the time is over; does nothing if the work has begun."""
        what = "a free thread: earlier calls of this client that return early are under way"
        self.refuse(DeadlineExceededError(what=what, timeout_s=deadline.timeout_s))
