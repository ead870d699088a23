"""The client's end of one session: its stream, its requests under way, its channel to the data worker."""

from __future__ import annotations

import math
import os
import socket
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from queue import Empty, SimpleQueue
from threading import Lock, current_thread, main_thread
from typing import Any

from tdserve.client.mailbox import Mailbox
from tdserve.config import MAIL_INLINE_BYTES, PROTOCOL_VERSION
from tdserve.control.connection import ControlConnection
from tdserve.control.status import decode_failure
from tdserve.errors import ConnectError, DeadlineExceededError, TDServeError, TransportError
from tdserve.transport.channel import Channel, Work
from tdserve.transport.forming import Forming
from tdserve.transport.gloo import CLIENT_RANK, CONNECT_TIMEOUT_S, GlooChannel, KVStore
from tdserve.v1 import control_pb2

ANSWER_GRACE_S = 1.0
"""The server ends a wait at its deadline by itself; its answer gets this long to arrive before we give up."""

SIGNAL_POLL_S = 0.5
"""Python looks at a signal that comes just before a wait begins only when the wait ends (seen once in sixty times)."""

MAX_POLL_S = 3600.0
"""Longer than this no lock of Python can wait everywhere."""

Answer = control_pb2.ServerMessage | TDServeError
OnAnswer = Callable[[Answer], None]


class Pending:
    """A request that was sent; its answers arrive here, in order.

    Args:
        on_answer: Called in the stream's thread instead of keeping the answer for ``wait``; must not block.
        on_silence: Called when ``wait`` has waited in vain: what may still come, nobody would take.

    Attributes:
        has_failed: Whether ``wait`` has raised what the server answered, or how the session ended.
        is_mailed: Whether the request went as mail.
    """

    def __init__(self, on_answer: OnAnswer | None = None, *, on_silence: Callable[[], None]) -> None:
        self._answers: SimpleQueue[Answer] = SimpleQueue()
        self._on_silence = on_silence
        self.put: OnAnswer = on_answer or self._answers.put
        self.has_failed = False
        self.is_mailed = False

    def wait(self, timeout_s: float | None, what: str) -> control_pb2.ServerMessage:
        """Returns the next answer.

        Raises:
            DeadlineExceededError: There was none in time.
            TDServeError: What the server answered, or how the session ended.
        """
        end_s = math.inf if timeout_s is None else time.monotonic() + timeout_s
        poll_s = SIGNAL_POLL_S if current_thread() is main_thread() else MAX_POLL_S  # no other thread gets signals
        while True:
            remaining_s = max(end_s - time.monotonic(), 0.0)
            try:
                answer = self._answers.get(timeout=min(remaining_s, poll_s))
                break
            except Empty:
                if remaining_s <= poll_s:
                    self._on_silence()
                    raise DeadlineExceededError(what=f"an answer to {what}", timeout_s=timeout_s) from None
        self.has_failed = isinstance(answer, TDServeError) or answer.HasField("failure")
        return checked(answer)


def checked(answer: Answer) -> control_pb2.ServerMessage:
    """The server's message, unless it or the session's end is an error, which is raised."""
    if isinstance(answer, TDServeError):
        raise answer
    if answer.HasField("failure"):
        raise decode_failure(answer.failure)
    return answer


class Session:
    """An open session. Threads: safe; requests of several threads run side by side.

    Args:
        connection: The channel to the control process.
        client_id: Names the client object, across its sessions.
        transport: Of the content.
        oldest_request: Requests before it will not be retried.
        timeout_s: For Hello and Welcome.

    Attributes:
        connect_timeout_s: For whoever uses the channel first: its call may take no longer than it was told.

    Raises:
        ConnectError, UnauthenticatedError, ProtocolVersionError: There is no session.
    """

    def __init__(
        self,
        connection: ControlConnection,
        *,
        client_id: bytes,
        transport: str,
        oldest_request: int,
        timeout_s: float,
    ) -> None:
        self.address = connection.address
        self.known_specs: set[bytes] = set()
        self.connect_timeout_s = CONNECT_TIMEOUT_S
        self._lock = Lock()
        greeting = Pending(on_silence=self.close)
        self._pending: dict[int, Pending] = {0: greeting}
        self._lost: TDServeError | None = None
        self._channel: Channel | None = None
        self._forming: Forming | None = None
        self._mailbox: Mailbox | None = None
        self._kept: dict[int, list[Work]] = {}
        self._kv_store = KVStore(self._publish)
        self._stream = connection.open_session(on_message=self._on_message, on_lost=self._on_lost)
        hello = control_pb2.Hello(
            protocol_version=PROTOCOL_VERSION,
            client_id=client_id,
            transport=transport,
            boot_id=_boot_id(),
            pid=os.getpid(),
            host=socket.gethostname(),
            oldest_request=oldest_request,
        )
        self._stream.send(control_pb2.ClientMessage(hello=hello))
        try:
            self.welcome = greeting.wait(timeout_s, "Hello").welcome
        except BaseException:
            self.close()
            raise
        mailbox = Mailbox(
            lambda: address_towards(self.address), self._send_rendezvous, self._on_message, peer=self._peer
        )
        with self._lock:
            self._mailbox = mailbox
        if self._lost is not None:
            mailbox.close()

    @property
    def is_lost(self) -> bool:
        """Whether this session is over; the next call opens another."""
        return self._lost is not None

    def send(self, request: int, *, on_answer: OnAnswer | None = None, **body: Any) -> Pending:
        """Sends a request.

        Args:
            request: Its number.
            on_answer: As in Pending.
            **body: One field of ClientMessage.

        Raises:
            TransportError: The session is lost.
        """
        # The server answers within the time that it was told. When it does not, and then grants after all, its content
        # would stand in the channel in front of everything else.
        pending = Pending(on_answer, on_silence=self.close)
        with self._lock:
            if self._lost is not None:
                raise self._lost
            self._pending[request] = pending
        message = control_pb2.ClientMessage(request=request, **body)
        pending.is_mailed = self._mailbox is not None and self._mailbox.send(message)
        if not pending.is_mailed:
            self._stream.send(message)
        return pending

    def keep(self, request: int, works: Iterable[Work]) -> None:
        """Keeps sends of a refused request: one that is dropped is given up, and the peer would wait for it."""
        with self._lock:
            self._kept[request] = list(works)

    def let_go_before(self, request: int) -> None:
        """This request's content was taken, and with it all that was sent before."""
        if self._kept:
            with self._lock:
                self._kept = {kept: works for kept, works in self._kept.items() if kept > request}

    def forget(self, request: int) -> None:
        """The request is answered, or its answer does not matter any more."""
        with self._lock:
            self._pending.pop(request, None)

    def cancel(self, request: int) -> None:
        """Asks the server to give a waiting request up; the same way as the request, which it must not overtake."""
        message = control_pb2.ClientMessage(cancel=control_pb2.CancelRequest(cancelled=request))
        pending = self._pending.get(request)
        if pending is not None and pending.is_mailed and self._mailbox is not None:
            with suppress(TransportError):
                self._mailbox.send(message)
        else:
            self._stream.send(message)

    @property
    def inline_bytes(self) -> int:
        """Content up to this size rides in a request."""
        limit: int = self.welcome.inline_bytes
        is_mail = self._mailbox is not None and self._mailbox.is_open
        return min(limit, MAIL_INLINE_BYTES) if is_mail else limit

    @property
    def _peer(self) -> str:
        return f"the server at {self.address}"

    @property
    def has_channel(self) -> bool:
        """Whether the channel is open."""
        return self._channel is not None

    @property
    def channel(self) -> Channel:
        """The channel to the data worker, connected by the first that needs it.

        Raises:
            ConnectError: It cannot be connected; the session is closed.
        """
        channel = self._channel
        if channel is None:
            with self._lock:
                if self._lost is not None:
                    raise self._lost
                if self._forming is None:
                    self._forming = Forming(self._make_channel, peer=self._peer, name="tdserve-open-channel")
                forming = self._forming
            try:
                channel = self._channel = forming.wait(self.connect_timeout_s)
            except ConnectError:
                self.close()
                raise
        return channel

    def failure_of(self, pending: Pending, error: TDServeError) -> TDServeError:
        """The true reason of a broken transfer: a Failure that the server sends along, else the transport's error.

        Closes the session: content of this transfer may still be under way, and nobody takes it any more.
        """
        told = error
        if not pending.has_failed:
            try:
                pending.wait(ANSWER_GRACE_S, "the transfer")
            except TDServeError as failure:
                told = failure if pending.has_failed else error
        self.close()
        return told

    def close(self) -> None:
        """Ends the session and everything under way in it. Idempotent."""
        self._on_lost(ConnectError(address=self.address, reason="the session was closed by this client"))
        self._stream.close()

    def _make_channel(self) -> Channel:
        return GlooChannel(
            self._kv_store,
            CLIENT_RANK,
            host=address_towards(self.address),
            peer=self._peer,
            timeout_s=self.connect_timeout_s,
        )

    def _publish(self, key: str, value: bytes) -> None:
        self._send_rendezvous(control_pb2.Rendezvous(key=key, value=value))

    def _send_rendezvous(self, entry: control_pb2.Rendezvous) -> None:
        self._stream.send(control_pb2.ClientMessage(rendezvous=entry))

    def _on_message(self, message: control_pb2.ServerMessage) -> None:
        if message.HasField("rendezvous"):
            entry = message.rendezvous
            if not entry.is_mail:
                self._kv_store.feed(entry.key, entry.value)
            elif self._mailbox is not None:
                self._mailbox.feed(entry)
            return
        pending = self._pending.get(message.request)
        if pending is not None:
            pending.put(message)

    def _on_lost(self, error: TDServeError) -> None:
        with self._lock:
            if self._lost is not None:
                return
            self._lost = error
            waiting, self._pending = list(self._pending.values()), {}
            forming, mailbox = self._forming, self._mailbox
        for pending in waiting:
            pending.put(error)
        self._kv_store.close()
        if forming is not None:
            forming.cancel(error)
        if mailbox is not None:
            mailbox.close()


def address_towards(address: str) -> str:
    """The address of the interface through which this machine reaches ``host:port``."""
    host, _, port = address.rpartition(":")
    try:
        found = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_DGRAM)
    except (OSError, ValueError) as error:
        raise ConnectError(address=address, reason=f"the name does not resolve: {error}") from error
    family, kind, protocol, _, target = found[0]
    with socket.socket(family, kind, protocol) as probe:
        try:
            probe.connect(target)  # sends nothing: only asks the routing table
        except OSError as error:
            raise ConnectError(address=address, reason=f"no route: {error}") from error
        return str(probe.getsockname()[0])


def _boot_id() -> str:
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return file.read().strip()
    except OSError:
        return ""
