"""The requests of a session that are under way, and the end of the session, which ends them all."""

from __future__ import annotations

from collections.abc import Callable
from threading import Event, Lock

from tdserve.base.errors import TDServeError
from tdserve.client.session.requests.pending import Pending, RequestStage
from tdserve.v1 import control_pb2

HELLO_REQUEST = 0
"""Number of the message that opens a session, which is answered like a request."""


class OpenRequests:
    """The requests of one session. Threads: safe.

    What was spooled for a request stays until the server has finished that, even if its caller has forgotten it: the
    server may still read it.

    Args:
        greeting: Receives the answer to Hello.

    Attributes:
        loss: Why the session is over; None while it is open.
        is_over: Set together with ``loss``.
    """

    def __init__(self, greeting: Pending) -> None:
        self.loss: TDServeError | None = None
        self.is_over = Event()
        self._lock = Lock()
        self._pending = {HELLO_REQUEST: greeting}
        self._frees: dict[int, Callable[[], None]] = {}

    def add(self, request: int, pending: Pending, free: Callable[[], None] | None) -> None:
        """Adds a request before it is sent.

        Args:
            free: Called when the server has finished it.

        Raises:
            TDServeError: The session is over: the reason.
        """
        with self._lock:
            if self.loss is not None:
                raise self.loss
            self._pending[request] = pending
            if free is not None:
                self._frees[request] = free

    def find(self, request: int) -> Pending | None:
        """Returns a request that is under way."""
        return self._pending.get(request)

    def withdraw(self, request: int, pending: Pending) -> bool:
        """Removes a request that could not be sent; returns False if it has ended with the session."""
        with self._lock:
            return self._pending.pop(request, None) is pending

    def forget(self, request: int) -> Pending | None:
        """Forgets a request that is answered, or whose answer does not matter any more; returns it if it was there."""
        with self._lock:
            pending = self._pending.pop(request, None)
        if pending is None or pending.stage is RequestStage.ENDED:
            self._free(request)
        return pending

    def on_handled(self, message: control_pb2.ServerMessage) -> None:
        """Frees what a forgotten request has spooled, if this message finishes it."""
        if self._frees and message.request not in self._pending and not message.HasField("accepted"):
            self._free(message.request)

    def end(self, error: TDServeError) -> bool:
        """Ends the session: all requests get the error. Returns False if it was over before."""
        with self._lock:
            if self.loss is not None:
                return False
            self.loss = error
            self.is_over.set()
            waiting, self._pending = list(self._pending.values()), {}
        for pending in waiting:
            pending.put(error)
        return True

    def _free(self, request: int) -> None:
        if not self._frees:
            return
        with self._lock:
            free = self._frees.pop(request, None)
        if free is not None:
            free()
