"""Coroutines that wait for a state to change; ten thousand of them hold no thread."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

from tdserve.deadline import Deadline
from tdserve.errors import DeadlineExceededError, StoreNotFoundError

_State = TypeVar("_State")


class Waiters:
    """Who waits for one thing (a store, its rows, its newest version) to change."""

    def __init__(self) -> None:
        # in the order of their requests: a client receives on one channel in the order in which it asked
        self._futures: dict[asyncio.Future[None], None] = {}
        self._deleted_name: str | None = None

    def wake(self) -> None:
        """Lets every waiter look again."""
        for future in self._futures:
            if not future.done():
                future.set_result(None)
        self._futures.clear()

    def delete(self, name: str) -> None:
        """The store ``name``, whose states these are, is no more: whoever waits, now or later, is told so."""
        self._deleted_name = name
        self.wake()

    def check_present(self) -> None:
        """Raises StoreNotFoundError after ``delete``."""
        if self._deleted_name is not None:
            raise StoreNotFoundError(name=self._deleted_name)

    async def wait_for(self, look: Callable[[], _State | None], deadline: Deadline, what: Callable[[], str]) -> _State:
        """Returns the first result of ``look`` that is not None; looks at once, and after every ``wake``.

        Raises:
            DeadlineExceededError: There was none in time; ``what`` says what was waited for, and why.
            StoreNotFoundError: The store was deleted.
        """
        while True:
            self.check_present()
            state = look()
            if state is not None:
                return state
            remaining_s = deadline.remaining_s
            if deadline.expired:
                timeout_s = deadline.timeout_s  # the client's, less what the way here took
                raise DeadlineExceededError(what=what(), timeout_s=None if timeout_s is None else round(timeout_s, 2))
            future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._futures[future] = None
            try:
                await asyncio.wait_for(future, remaining_s)
            except asyncio.TimeoutError:
                continue  # look once more: the state may have changed in the last moment
            finally:
                self._futures.pop(future, None)
