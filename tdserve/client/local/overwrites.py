"""Overwrites of a local client from their request to their answer: a session that ends in between loses the rows.

New rows of a writer that goes away are nobody's; rows that were there, and that it was about to overwrite, are lost to
all. So whoever ends a session gives up the overwrites that still wait, and waits for those that the server has let it
do: which these are, only the answers tell.
"""

from __future__ import annotations

from collections.abc import Callable
from threading import Condition

from tdserve.base.errors import ConnectError
from tdserve.v1 import control_pb2


class Overwrites:
    """Those of one session. Threads: safe.

    Args:
        place: Where the session is, for errors.
    """

    def __init__(self, place: str) -> None:
        self._place = place
        self._changed = Condition()
        self._under_way: set[int] = set()
        self._is_ending = False

    def begin(self, message: control_pb2.ClientMessage) -> None:
        """A message is sent now. Raises ConnectError when it would begin an overwrite and none may begin any more."""
        if message.HasField("write"):
            with self._changed:
                if self._is_ending:
                    raise ConnectError(address=self._place, reason="the session is being closed by this client")
                self._under_way.add(message.request)

    def on_message(self, message: control_pb2.ServerMessage) -> None:
        """A message of the server was dealt with."""
        if self._under_way and not message.HasField("accepted"):
            with self._changed:
                self._under_way.discard(message.request)
                self._changed.notify_all()

    def end(self, give_up: Callable[[int], None], timeout_s: float) -> None:
        """None begins any more; waits for the end of those under way, or so long.

        Args:
            give_up: Asks the server to give up a request that still waits.
        """
        with self._changed:
            self._is_ending = True
            under_way = list(self._under_way)
        for request in under_way:
            give_up(request)
        with self._changed:
            self._changed.wait_for(lambda: not self._under_way, timeout_s)

    def lose(self) -> None:
        """The session is over: no answer comes any more."""
        with self._changed:
            self._is_ending = True
            self._under_way.clear()
            self._changed.notify_all()
