"""Requests whose caller has stopped waiting, and whose answers may still arrive.

The session stays open for other calls, unless such an answer brings something that must be received and cannot be given
back. Rows that the server grants on lease are no such thing: the cancellation of the request gives them back.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from enum import Enum
from threading import Lock
from typing import Any

from tdserve.v1 import control_pb2

SILENT_S = 10.0
"""A server that still owes an answer this long after the deadline will not send it: the next call opens another
session. A lost connection is detected without this."""


class Brings(Enum):
    """The content of the late answer to an abandoned request."""

    NOTHING = 0
    CONTENT = 1  # over its channel, which a new one must replace
    PLACE = 2  # in a group: the session has it now, and gives it up when it ends


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
        """Returns whether the server has owed an answer for longer than ``SILENT_S``."""
        with self._lock:
            return any(self._clock() - since > SILENT_S for since, _ in self._since.values())

    def look(self, message: control_pb2.ServerMessage) -> Brings:
        """Returns what a message brings to an abandoned request.

        A permit brings nothing: the client answers it, and the server then
        ends the request."""
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
