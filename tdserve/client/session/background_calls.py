"""A client's calls that return early: they run in threads of its own."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from threading import Lock
from typing import Any, TypeVar

from tdserve.base.deadline import Deadline
from tdserve.base.errors import ClosedError
from tdserve.client.session.awaitable_future import AwaitableFuture
from tdserve.client.session.call_order import CallOrder
from tdserve.client.session.call_traces import carry_context

_Result = TypeVar("_Result")

MAX_THREADS = 4
"""Threads of one client. What waits longer, such as coalesced extends, holds none."""


class BackgroundCalls:
    """The threads of one client, made on demand.

    Threads: safe.

    Args:
        name: Name of the threads.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = Lock()
        self._executor: ThreadPoolExecutor | None = None
        self._order = CallOrder()

    def run(self, work: Callable[[], _Result], *, in_turn: str = "") -> AwaitableFuture[_Result]:
        """Runs work in one of the threads, also after ``close``: work that finds its client closed fails by itself, as
        all work does once the interpreter is exiting.

        Args:
            in_turn: Name of a store: the work begins when earlier work that was given this name has ended.
        """
        future: AwaitableFuture[_Result] = AwaitableFuture()
        submit = partial(self._submit, future, carry_context(work))
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

    def _submit(self, future: AwaitableFuture[_Result], work: Callable[[], _Result]) -> Future[None]:
        with self._lock:
            if self._executor is None:
                self._executor = ThreadPoolExecutor(MAX_THREADS, thread_name_prefix=self._name)
            try:
                return self._executor.submit(future.run, work)
            except RuntimeError:
                future.run(_refuse_at_exit)
                return AwaitableFuture.make_done(None)


def _refuse_at_exit() -> Any:
    raise ClosedError(what="the interpreter")
