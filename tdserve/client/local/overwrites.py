"""The overwrites of a local session: which are under way, permitted, or refused before it ends."""

from __future__ import annotations

from collections.abc import Callable
from threading import Condition

from tdserve.base.errors import ConnectError
from tdserve.v1 import control_pb2


class Overwrites:
    """The overwrites of one session, from request to answer. Threads: safe.

    If a writer is lost, its new rows are simply never committed. Existing rows that it was permitted to overwrite,
    however, are lost to all clients. So before a session ends, its waiting overwrites are cancelled, and permitted ones
    are finished; only the answers show which these are. What has neither an answer nor a permit by then is refused: the
    server learns that its rows are whole, even if it reads the request only after this.

    Args:
        place: The session's place, for errors.
    """

    def __init__(self, place: str) -> None:
        self._place = place
        self._changed = Condition()
        self._under_way: set[int] = set()
        self._begun: set[int] = set()
        self._refused: set[int] = set()
        self._copying = 0
        self._is_ending = False

    def begin(self, message: control_pb2.ClientMessage) -> None:
        """Notes a message that is sent now. Raises ConnectError if it begins an overwrite after ``end``."""
        if message.HasField("write"):
            with self._changed:
                if self._is_ending:
                    raise ConnectError(address=self._place, reason="the session is being closed by this client")
                self._under_way.add(message.request)

    @property
    def is_copying(self) -> bool:
        """Whether one is being copied, in the thread that receives messages."""
        return bool(self._copying)

    def admit(self, message: control_pb2.ServerMessage) -> bool:
        """Notes a message of the server that is about to be handled; returns False if it permits what was refused."""
        if not message.HasField("accepted"):
            return True
        with self._changed:
            if message.request in self._under_way:
                self._begun.add(message.request)
                self._copying = message.request
            return message.request not in self._refused

    def on_message(self, message: control_pb2.ServerMessage) -> None:
        """Notes a message of the server that was handled."""
        if not self._under_way:
            return
        with self._changed:
            if message.request == self._copying:
                self._copying = 0
            if not message.HasField("accepted"):
                self._under_way.discard(message.request)
                self._begun.discard(message.request)
                self._changed.notify_all()

    def end(self, give_up: Callable[[int], None], refuse: Callable[[int], None], timeout_s: float) -> None:
        """Lets no overwrite begin any more, waits for those under way, at most for this time, and refuses the rest.

        Args:
            give_up: Asks the server to cancel a request that still waits.
            refuse: Tells the server that nothing was written for a request, and will not be.
        """
        with self._changed:
            self._is_ending = True
            under_way = list(self._under_way)
        for request in under_way:
            give_up(request)
        with self._changed:
            self._changed.wait_for(lambda: not self._under_way, timeout_s)
            refused = self._under_way - self._begun
            self._refused |= refused
            self._under_way -= refused
        for request in refused:
            refuse(request)

    def lose(self) -> None:
        """Notes that the session is over: no answer comes any more."""
        with self._changed:
            self._is_ending = True
            self._under_way.clear()
            self._copying = 0
            self._changed.notify_all()
