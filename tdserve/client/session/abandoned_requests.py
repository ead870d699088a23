"""Requests that nobody waits for any more, and whose answers may still come.

Their session goes on, with all that it holds for other calls, unless such an answer brings what somebody must take and
cannot give back. The server gives back what it grants them on lease: their cancellation tells it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from enum import Enum
from threading import Lock
from typing import Any

from tdserve.v1 import control_pb2

SILENT_S = 10.0
"""A server that has not answered for so long, behind the deadline, will not: whoever comes next opens another session.
One whose connection is gone is found out by its own means."""


class Brings(Enum):
    """What an answer brings that nobody waits for."""

    NOTHING = 0
    CONTENT = 1  # over its channel, which another must replace
    PLACE = 2  # in a group, which the session has now, and gives up with its end


class AbandonedRequests:
    """The abandoned requests of one session. Threads: safe.

    Args:
        clock: Seconds that never go back.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = Lock()
        self._since: dict[int, tuple[float, bool]] = {}

    def add(self, request: int, body: Mapping[str, Any]) -> None:
        """Adds a request whose caller has stopped waiting.

        Args:
            body: The field of its message.
        """
        takes_place = "join_group" in body
        with self._lock:
            self._since[request] = (self._clock(), takes_place)

    @property
    def is_silent(self) -> bool:
        """Whether the server has owed an answer for longer than ``SILENT_S``."""
        with self._lock:
            return any(self._clock() - since > SILENT_S for since, _ in self._since.values())

    def look(self, message: control_pb2.ServerMessage) -> Brings:
        """Returns what a message brings that no caller waits for; nothing, if it is a permit: the server gets an answer
        to that, and ends the request."""
        if not self._since:
            return Brings.NOTHING
        with self._lock:
            found = self._since.get(message.request)
            if found is None or message.accepted.uid:
                return Brings.NOTHING
            del self._since[message.request]
        if message.HasField("accepted"):
            return Brings.CONTENT
        return Brings.PLACE if found[1] and not message.HasField("failure") else Brings.NOTHING
