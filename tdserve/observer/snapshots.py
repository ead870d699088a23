"""The figures of the server as they were asked for last. Questions within a second are shown the same ones."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol, TypeVar

from tdserve.base.errors import TDServeError
from tdserve.client.session.catalog.description import StoreDescription
from tdserve.v1 import control_pb2

FRESH_S = 1.0
"""Age up to which figures are shown again: many scrapers and pages cost the server one question a second."""

ASK_TIMEOUT_S = 2.0
"""Longest wait for the server: Prometheus gives up a scrape after ten seconds."""

MAX_STORES = 1_000
"""Stores that are shown by name in the metrics; the others are summed up."""

MAX_SESSIONS = 1_000

_Result = TypeVar("_Result")


class Asker(Protocol):
    """What is asked: a client of the server."""

    def observe(
        self, *, max_stores: int = 0, names: list[str], max_sessions: int = 0, timeout_s: float | None = None
    ) -> control_pb2.ObserveResponse: ...

    def stores(self, prefix: str = "") -> list[str]: ...

    def find(self, name: str, *, timeout_s: float | None = None) -> StoreDescription | None: ...


@dataclass(frozen=True)
class ServerSnapshot:
    """The server at one moment.

    Attributes:
        taken_s: The moment, by ``time.monotonic``.
        duration_s: Time that the question took.
        figures: The answer; None if there was none.
        reason: Why not.
    """

    taken_s: float
    duration_s: float
    figures: control_pb2.ObserveResponse | None
    reason: str = ""


class Snapshots:
    """The newest snapshot, taken again when it is too old. One question is under way at a time.

    Args:
        client: A client of the server; any thread may call it.
    """

    def __init__(self, client: Asker) -> None:
        self._client = client
        self._turn = asyncio.Lock()
        self._newest: ServerSnapshot | None = None

    async def get(self) -> ServerSnapshot:
        """Returns a snapshot of the last second."""
        async with self._turn:
            newest = self._newest
            if newest is None or time.monotonic() - newest.taken_s >= FRESH_S:
                newest = self._newest = await asyncio.to_thread(self._take)
            return newest

    async def observe_stores(self, names: Iterable[str]) -> list[control_pb2.StoreFigures]:
        """Returns the figures of these stores, now; those that do not exist are left out.

        Raises:
            TDServeError: The server does not answer.
        """
        wanted = list(names)
        found = await self.ask(lambda: self._client.observe(names=wanted, timeout_s=ASK_TIMEOUT_S))
        return list(found.stores)

    async def describe_store(self, name: str) -> StoreDescription | None:
        """Describes a store with its structure; None if there is none. Raises TDServeError."""
        return await self.ask(lambda: self._client.find(name, timeout_s=ASK_TIMEOUT_S))

    async def list_names(self) -> list[str]:
        """Returns the names of all stores, sorted. Raises TDServeError if the server does not answer."""
        return await self.ask(self._client.stores)

    async def ask(self, question: Callable[[], _Result]) -> _Result:
        """Asks the server something else, in turn. Errors as from the question."""
        async with self._turn:
            return await asyncio.to_thread(question)

    def _take(self) -> ServerSnapshot:
        begun_s = time.monotonic()
        try:
            figures, reason = (
                self._client.observe(
                    max_stores=MAX_STORES, names=[], max_sessions=MAX_SESSIONS, timeout_s=ASK_TIMEOUT_S
                ),
                "",
            )
        except TDServeError as error:
            return ServerSnapshot(time.monotonic(), time.monotonic() - begun_s, None, str(error))
        return ServerSnapshot(time.monotonic(), time.monotonic() - begun_s, figures, reason)
