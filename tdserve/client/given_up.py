"""Requests that nobody waits for any more, and whose answers may still come.

Their session goes on, with all that it holds for other calls, unless such an answer brings what somebody must take.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from threading import Lock
from typing import Any

from tdserve.v1 import control_pb2

SILENT_S = 10.0
"""A server that has not answered for so long, behind the deadline, will not: whoever comes next opens another session.
One whose connection is gone is found out by its own means."""


class GivenUp:
    """Those of one session. Threads: safe.

    Args:
        clock: Seconds that never go back.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = Lock()
        self._since: dict[int, tuple[float, bool]] = {}

    def add(self, request: int, body: Mapping[str, Any]) -> None:
        """A request is given up.

        Args:
            body: The field of its message.
        """
        sample = body.get("sample")
        holds = "join_group" in body or (sample is not None and sample.is_lease)
        with self._lock:
            self._since[request] = (self._clock(), holds)

    @property
    def is_silent(self) -> bool:
        """Whether the server has owed an answer for long."""
        with self._lock:
            return any(self._clock() - since > SILENT_S for since, _ in self._since.values())

    def ends_session(self, message: control_pb2.ServerMessage, *, is_local: bool) -> bool:
        """Whether a message brings what nobody takes, so that the session must end: content that comes over the
        channel, rows on lease, a place in a group.

        Args:
            is_local: Whether content of the session is moved by the client, which then says that it does not.
        """
        if not self._since:
            return False
        with self._lock:
            found = self._since.get(message.request)
            if found is None:
                return False
            if message.HasField("accepted"):
                return not is_local
            del self._since[message.request]
        return found[1] and not message.HasField("failure")
