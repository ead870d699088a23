"""The future of a call with ``return_early=True``."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future
from contextlib import suppress
from threading import Lock
from typing import Any, TypeVar

_Result = TypeVar("_Result")


class AwaitableFuture(Future[_Result]):
    """A ``concurrent.futures.Future`` that may also be awaited, in any running event loop, by several tasks.

    A task that is cancelled while it awaits stops waiting. The request continues, and the future still gets its result.
    If the future itself was cancelled, those who await it get ``concurrent.futures.CancelledError``, which is not taken
    for the cancellation of their task.
    """

    @classmethod
    def make_running(cls) -> AwaitableFuture[_Result]:
        """Returns a future that cannot be cancelled: its request is under way, alone or with others."""
        future = cls()
        future.set_running_or_notify_cancel()
        return future

    @classmethod
    def make_done(cls, result: _Result) -> AwaitableFuture[_Result]:
        """Returns a future that has its result."""
        future = cls()
        future.set_result(result)
        return future

    def run(self, work: Callable[[], _Result]) -> None:
        """Runs work and takes over its result or error, unless the future was cancelled before."""
        if not self.set_running_or_notify_cancel():
            return
        try:
            result = work()
        except BaseException as error:  # noqa: BLE001 (the caller that waits for the result raises it)
            self.set_exception(error)
        else:
            self.set_result(result)

    def convert(self, function: Callable[[_Result], Any]) -> AwaitableFuture[Any]:
        """Returns a future of the result of ``function``, which is called with the result of this future."""
        converted: AwaitableFuture[Any] = AwaitableFuture.make_running()

        def settle(done: Future[_Result]) -> None:
            try:
                converted.set_result(function(done.result()))
            except BaseException as error:  # noqa: BLE001 (the caller that waits for the result raises it)
                converted.set_exception(error)

        self.add_done_callback(settle)
        return converted

    def pass_on(self, to: Future[_Result]) -> None:
        """Ends another future as this one ends, in the same thread."""

        def settle(done: Future[_Result]) -> None:
            if (error := done.exception()) is None:
                to.set_result(done.result())
            else:
                to.set_exception(error)

        self.add_done_callback(settle)

    @classmethod
    def gather(
        cls, futures: Sequence[Future[Any]], join: Callable[[Sequence[Any]], _Result]
    ) -> AwaitableFuture[_Result]:
        """Returns a future of what ``join`` makes of the results of several, at least one, once all have ended; it
        raises the first error."""
        gathered: AwaitableFuture[_Result] = cls.make_running()
        left, lock = [len(futures)], Lock()

        def settle(_: Future[Any]) -> None:
            with lock:
                left[0] -= 1
                if left[0]:
                    return
            try:
                gathered.set_result(join([future.result() for future in futures]))
            except BaseException as error:  # noqa: BLE001 (the caller that waits for the result raises it)
                gathered.set_exception(error)

        for future in futures:
            future.add_done_callback(settle)
        return gathered

    def __await__(self) -> Generator[Any, None, _Result]:
        if not self.done():
            loop = asyncio.get_running_loop()
            waiter = loop.create_future()

            def wake() -> None:
                if not waiter.done():
                    waiter.set_result(None)

            def call_wake(_: Future[_Result]) -> None:
                with suppress(RuntimeError):  # a task was cancelled, and its loop has been closed since
                    loop.call_soon_threadsafe(wake)

            self.add_done_callback(call_wake)
            yield from waiter
        return self.result()
