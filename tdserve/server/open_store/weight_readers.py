"""Which session has read which version of some weights, and for how long each has lacked a newer one."""

from __future__ import annotations

import asyncio
import time
from bisect import bisect_right
from collections import deque
from dataclasses import dataclass
from typing import Protocol

from tdserve.rules.weights import STEP_AFTER_LOSS
from tdserve.v1 import control_pb2

MAX_SHOWN = 100
"""Most readers that figures name: those that lag most."""

MAX_PUBLICATIONS = 256
"""Publications whose times are remembered. A reader that lags more has lacked a newer version since the first of these,
at least."""


class ReaderSession(Protocol):
    """What is used of a session; see the attributes of ``ClientSession``."""

    number: int
    hello: control_pb2.Hello
    ended: asyncio.Event


@dataclass
class _Reading:
    session: ReaderSession
    version: int
    read_s: float


class Readers:
    """The readers of one weights store, as far as they have a session. Kept in memory only."""

    def __init__(self) -> None:
        self._by_session: dict[int, _Reading] = {}
        self._published: deque[tuple[int, float]] = deque(maxlen=MAX_PUBLICATIONS)
        self._look_at = 64

    def note_read(self, session: ReaderSession, version: int) -> None:
        """Notes that a session was sent a version."""
        if session.number not in self._by_session and len(self._by_session) >= self._look_at:
            self._drop_ended()
            self._look_at = 2 * len(self._by_session) + 64
        self._by_session[session.number] = _Reading(session, version, time.monotonic())

    def note_published(self, version: int) -> None:
        """Notes that a version was published."""
        self._published.append((version, time.monotonic()))

    def add_figures(self, newest: int, figures: control_pb2.StoreFigures) -> None:
        """Adds the readers to the figures of their store.

        Args:
            newest: The newest version.
        """
        self._drop_ended()
        now_s, published = time.monotonic(), list(self._published)
        figures.num_readers = len(self._by_session)
        for reading in sorted(self._by_session.values(), key=lambda each: each.version)[:MAX_SHOWN]:
            lag = max(newest - reading.version, 0) % STEP_AFTER_LOSS  # numbers are skipped in whole steps
            first_newer = bisect_right(published, (reading.version, now_s))
            age_s = now_s - published[first_newer][1] if lag and first_newer < len(published) else 0.0
            figures.readers.add(
                session=reading.session.number,
                host=reading.session.hello.host,
                pid=reading.session.hello.pid,
                version=reading.version,
                read_s=now_s - reading.read_s,
                lag=lag,
                age_s=age_s,
            )

    def _drop_ended(self) -> None:
        ended = [number for number, reading in self._by_session.items() if reading.session.ended.is_set()]
        for number in ended:
            del self._by_session[number]
