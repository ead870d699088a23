"""Those that wait for a store by its name."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from tdserve.base.deadline import Deadline
from tdserve.base.errors import DeadlineExceededError, StoreNotCreatedError, StoreNotFoundError
from tdserve.server.execution.waiting import Waiters

_State = TypeVar("_State")


class StoreWaiters:
    """They are kept by name, so that a change wakes only those of its store."""

    def __init__(self) -> None:
        self._by_name: dict[str, Waiters] = {}

    def wake(self, name: str) -> None:
        """Wakes those that wait for a store."""
        if name in self._by_name:
            self._by_name[name].wake()

    async def wait_created(self, name: str, look: Callable[[], _State | None], deadline: Deadline) -> _State:
        """Waits until a store exists.

        Args:
            look: Returns what is waited for, None if the store does not exist.

        Raises:
            StoreNotFoundError: It does not exist, and the timeout is 0.
            StoreNotCreatedError: It was not created in time.
        """
        if (found := look()) is not None:
            return found
        if deadline.timeout_s == 0:
            raise StoreNotFoundError(name=name)
        try:
            return await self.wait_for(name, look, deadline)
        except DeadlineExceededError as error:
            what = _describe_wait(name)
            raise StoreNotCreatedError(what=what, timeout_s=error.timeout_s, name=name) from None

    async def wait_for(self, name: str, look: Callable[[], _State | None], deadline: Deadline) -> _State:
        """Waits until ``look``, called when the store changes, returns something. Raises DeadlineExceededError."""
        waiters = self._by_name.setdefault(name, Waiters())
        try:
            return await waiters.wait_for(look, deadline, lambda: _describe_wait(name))
        finally:
            if not waiters.num_waiting and self._by_name.get(name) is waiters:
                del self._by_name[name]


def _describe_wait(name: str) -> str:
    return f"the creation of store {name!r}"
