"""The threads in which the calls of an asynchronous client run, and the coroutines that wait for them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Generator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from contextvars import copy_context
from functools import partial
from typing import Any, Protocol, TypeVar

from tdserve.base.errors import ClosedError
from tdserve.client.session.calls.awaitable_future import AwaitableFuture
from tdserve.client.session.calls.cancellation import Cancellation

_Result = TypeVar("_Result")


class Wrapper(Protocol):
    """A class that wraps synchronous objects of another class.

    Attributes:
        has_end: Whether a result that no caller gets must be closed.
    """

    has_end: bool

    def __call__(self, wrapped: Any, calls: Calls) -> Any:
        """Wraps an object."""


WRAPPERS: dict[type, Wrapper] = {}
"""The class that wraps each class of results."""


class Calls:
    """The threads in which the calls of one client run.

    Calls that end something (``close``, the end of a block) have threads of their own: others may wait for them.

    Args:
        max_threads: Most threads of either kind.
    """

    def __init__(self, max_threads: int) -> None:
        self._waiting = ThreadPoolExecutor(max_threads, thread_name_prefix="tdserve-aio")
        self._ending = ThreadPoolExecutor(max_threads, thread_name_prefix="tdserve-aio-end")

    def start(self, call: Callable[[], _Result], *, is_end: bool = False) -> AwaitableFuture[_Result]:
        """Runs a call in a thread, in the context of its task: in a block of ``within``, with its spans.

        Raises:
            ClosedError: The client was closed, or the interpreter is exiting.
        """
        future: AwaitableFuture[_Result] = AwaitableFuture()
        threads = self._ending if is_end else self._waiting
        try:
            threads.submit(future.run, partial(copy_context().run, call))
        except RuntimeError as fault:
            raise ClosedError(what="the client") from fault
        return future

    async def run(self, call: Callable[[], Any], *, is_end: bool = False, gives_up: bool = True) -> Any:
        """Runs a call and returns its result, wrapped if it is an object with calls of its own.

        If the task is cancelled, a call that waits for a thread does not begin, and one that waits on the server ends
        there and here. One that moves content continues to its end: what it brings is closed, and rows that it takes
        are given back.

        Args:
            is_end: Whether it ends something: then it continues to its end, also if it waits for a thread, and so does
                the wait for it; a cancellation is raised afterwards.
            gives_up: False lets every call that has begun continue.
        """
        if is_end:
            return self.wrap(await _complete(self.start(call, is_end=True)))
        cancellation = Cancellation()

        def watch() -> Any:
            with cancellation.watch():
                return call()

        future = self.start(watch)
        try:
            result = await future
        except asyncio.CancelledError:
            if not future.cancel():
                future.add_done_callback(self._discard_later)
                if gives_up:
                    with suppress(ClosedError):
                        self.start(cancellation.cancel, is_end=True)
            raise
        return self.wrap(await result if isinstance(result, AwaitableFuture) else result)

    def wrap(self, result: Any) -> Any:
        """Returns a result with coroutines, if it is a handle, iterator or writer, or a list or tuple of such."""
        kind = WRAPPERS.get(type(result))
        if kind is not None:
            return kind(result, self)
        if type(result) in (list, tuple) and any(type(each) in WRAPPERS for each in result):
            return type(result)(map(self.wrap, result))
        return result

    def shut_down(self) -> None:
        """Ends the threads, as soon as their calls have ended."""
        self._waiting.shutdown(wait=False)
        self._ending.shutdown(wait=False)

    def _discard_later(self, future: Future[Any]) -> None:
        with suppress(ClosedError):  # the end of the session has freed everything
            kind = WRAPPERS.get(type(future.result())) if future.exception() is None else None
            if kind is not None and kind.has_end:
                error = asyncio.CancelledError()
                self.start(lambda: future.result().__exit__(type(error), error, None), is_end=True)


async def _complete(future: AwaitableFuture[_Result]) -> _Result:
    """Returns the result of a call, after whose end a cancellation of the wait is raised."""
    cancelled: asyncio.CancelledError | None = None
    while not future.done():
        try:
            with suppress(Exception):  # raised below
                await future
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        raise cancelled
    return future.result()


class OpeningCall(Coroutine[Any, Any, _Result]):
    """A coroutine whose result has a beginning and an end: it may be awaited, entered or iterated.

    ``rows = await queue.take(8, ack=False)``, ``async with queue.take(8) as rows``, and
    ``async for weights in client.subscribe("policy")`` each make the call once.
    """

    def __init__(self, call: Coroutine[Any, Any, _Result]) -> None:
        self._call = call
        self._opened: Any = None

    def __await__(self) -> Generator[Any, Any, _Result]:
        return self._call.__await__()

    def send(self, value: Any) -> Any:
        """Continues; for the event loop."""
        return self._call.send(value)

    def throw(self, *error: Any) -> Any:
        """Raises an error in it; for the event loop."""
        return self._call.throw(*error)

    def close(self) -> None:
        """Ends it; for the event loop."""
        self._call.close()

    def __getattr__(self, name: str) -> Any:
        """Is what was opened, once it is: ``async with (taken := queue.take(8, lease_s=60)): await taken.renew()``."""
        opened = self.__dict__.get("_opened")
        return object.__getattribute__(self, name) if opened is None else getattr(opened, name)

    async def __aenter__(self) -> Any:
        self._opened = await self._call
        return await self._opened.__aenter__()

    async def __aexit__(self, *error: object) -> Any:
        return await self._opened.__aexit__(*error) if self._opened is not None else None

    async def __aiter__(self) -> AsyncIterator[Any]:
        async with self as opened:
            async for each in opened:
                yield each
