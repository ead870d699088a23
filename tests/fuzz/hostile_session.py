"""A session that sends anything, and the server's answers."""

from __future__ import annotations

import time
from queue import Empty, SimpleQueue

from tdserve.base.config import PROTOCOL_VERSION
from tdserve.base.errors import TDServeError
from tdserve.base.ids import make_client_id
from tdserve.control.connection import ControlConnection
from tdserve.control.status import decode_failure
from tdserve.v1 import control_pb2

UNANSWERED = (
    None,
    "hello",
    "rendezvous",
    "cancel",
    "channel_lost",
    "claimed",
    "group_notice",
    "relay_report",
    "client_report",
    "part",
    "written",
    "attach",
)
"""Kinds of messages without an answer."""


class HostileSession:
    """A session of a client that keeps to no rule.

    Args:
        address: Address of the server.
        token: Its token; None for none.
        transport: The one that it asks for.

    Attributes:
        welcome: The server's greeting.
        connection: Its connection.
    """

    def __init__(self, address: str, *, token: str | None = None, transport: str = "gloo") -> None:
        self.connection = ControlConnection(address, token=token)
        self.connection.wait_ready(20.0)
        self._answers: SimpleQueue[control_pb2.ServerMessage | TDServeError] = SimpleQueue()
        self._lost: TDServeError | None = None
        self.stream = self.connection.open_session(on_message=self._answers.put, on_lost=self._answers.put)
        hello = control_pb2.Hello(protocol_version=PROTOCOL_VERSION, client_id=make_client_id(), transport=transport)
        self.stream.send(control_pb2.ClientMessage(hello=hello))
        first = self._answers.get(timeout=30.0)
        if not isinstance(first, control_pb2.ServerMessage) or not first.HasField("welcome"):
            self.close()
            raise AssertionError(f"no welcome, but {first}")
        self.welcome = first.welcome

    @property
    def is_lost(self) -> bool:
        """Whether the server has ended it, as far as answers were read."""
        return self._lost is not None

    def send(self, message: control_pb2.ClientMessage) -> None:
        """Sends a message."""
        self.stream.send(message)

    def take_answer(self, timeout_s: float) -> control_pb2.ServerMessage | TDServeError | None:
        """Returns the next message, or why the session has ended; None if nothing comes in time."""
        try:
            answer = self._answers.get(timeout=max(timeout_s, 0.0))
        except Empty:
            return None
        if isinstance(answer, TDServeError):
            self._lost = answer
        return answer

    def collect(self, requests: set[int], timeout_s: float) -> dict[int, TDServeError | None]:
        """Waits for the answers of requests.

        Returns:
            The error of each that was answered; None for success. All that are not answered when the session ends get
            its error.
        """
        found: dict[int, TDServeError | None] = {}
        end_s = time.monotonic() + timeout_s
        while requests - found.keys():
            answer = self.take_answer(end_s - time.monotonic())
            if answer is None:
                break
            if isinstance(answer, TDServeError):
                return {**dict.fromkeys(requests, answer), **found}
            if answer.request in requests:
                is_failure = answer.HasField("failure")
                found[answer.request] = decode_failure(answer.failure) if is_failure else None
        return found

    def close(self) -> None:
        """Ends it."""
        self.stream.close()
        self.connection.close()
