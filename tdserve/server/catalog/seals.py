"""Stores that serve no request, because they move to another server or have done so, and times at which none is
made.

``server/README.md`` has reading orders of checkpoints and moves.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from tdserve.base.errors import StoreMovedError
from tdserve.rules.catalog import Catalog
from tdserve.server.execution import inline_tasks
from tdserve.server.kinds.placement_kind import find_forward

SLOW_CREATION_S = 0.05
"""Time between two stores that are made while a checkpoint is behind: it reads one in 10 to 20 ms."""

MAX_SLOW_S = 1.0
"""Longest wait for that, if very many are to be made at once."""


class Seal(NamedTuple):
    """Who has sealed a store.

    Attributes:
        session: The session, with which the seal ends.
        operation: Id of the move, checkpoint or change of settings for which it is at rest.
    """

    session: int
    operation: str


class SealedStores:
    """Which stores are sealed, and how many requests are still under way for each store.

    Args:
        catalog: All stores of the server.
    """

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog
        self._sealed: dict[str, Seal] = {}
        self._num_requests: Counter[str] = Counter()
        self._holds: set[asyncio.Future[None]] = set()
        self._slowed_by: set[Seal] = set()
        self._next_creation_s = 0.0

    @contextmanager
    def hold_creations(self) -> Iterator[None]:
        """While this block runs, stores that are to be made wait: all that there are come to rest, however many are
        made at other times."""
        is_over = asyncio.get_running_loop().create_future()
        self._holds.add(is_over)
        try:
            yield
        finally:
            self._holds.remove(is_over)
            is_over.set_result(None)

    def slow_creations(self, by: Seal) -> None:
        """Has stores made slowly, until ``end_slow_creations``."""
        self._slowed_by.add(by)

    def end_slow_creations(self, by: Seal) -> None:
        """Ends ``slow_creations``, if it has begun."""
        self._slowed_by.discard(by)

    def end_slow_creations_of(self, session: int) -> None:
        """Ends all that a session has begun."""
        self._slowed_by = {by for by in self._slowed_by if by.session != session}

    async def wait_for_creation(self) -> None:
        """Waits until a store may be made."""
        if self._slowed_by:
            await inline_tasks.ensure_task()
            now_s = time.monotonic()
            at_s = min(max(now_s, self._next_creation_s + SLOW_CREATION_S), now_s + MAX_SLOW_S)
            self._next_creation_s = at_s
            await asyncio.sleep(at_s - now_s)
        while self._holds:
            await inline_tasks.ensure_task()
            for is_over in [*self._holds]:
                await asyncio.shield(is_over)

    def seal(self, name: str, seal: Seal) -> None:
        """Refuses all further requests for a store, until ``unseal``. Raises StoreMovedError if another operation has
        sealed it."""
        if self._sealed.setdefault(name, seal) != seal:
            raise StoreMovedError(name=name)

    def unseal(self, name: str) -> None:
        """Ends ``seal``, if the store is sealed."""
        self._sealed.pop(name, None)

    def find(self, name: str) -> Seal | None:
        """Returns the seal of a store; None if it serves all requests."""
        return self._sealed.get(name)

    def list_of(self, session: int) -> list[str]:
        """Returns the names of the stores that a session has sealed."""
        return [name for name, seal in self._sealed.items() if seal.session == session]

    def check_here(self, name: str) -> None:
        """Raises StoreMovedError if a store is sealed, or another server has it."""
        if name in self._sealed:
            raise StoreMovedError(name=name)
        record = self._catalog.find(name)
        if record is not None and (placement := find_forward(record)) is not None:
            raise StoreMovedError(name=name, server=placement.servers[0], move=placement.move)

    def begin_request(self, name: str) -> None:
        """Counts a request for a store. Raises what ``check_here`` does; then it does not count."""
        self.check_here(name)
        self._num_requests[name] += 1

    def end_request(self, name: str) -> None:
        """Ends ``begin_request``."""
        self._num_requests[name] -= 1
        if not self._num_requests[name]:
            del self._num_requests[name]

    def count_task(self, name: str, task: asyncio.Task[None]) -> None:
        """Counts a task that a request for a store has started, and that may outlast it, as a request of its own."""
        self._num_requests[name] += 1
        task.add_done_callback(lambda _: self.end_request(name))

    def is_idle(self, name: str, *, num_own: int = 0) -> bool:
        """Returns whether no request for a store is under way, but this many of the caller's own."""
        return self._num_requests.get(name, 0) <= num_own
