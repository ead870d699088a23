"""The client's end of gRPC: unary calls and the session stream, with our errors instead of grpc's."""

from __future__ import annotations

import logging
import os
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress
from queue import SimpleQueue
from threading import Event, Lock, Thread, current_thread
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tdserve.base.addresses import resolve
from tdserve.base.deadline import compute_grace_s
from tdserve.base.errors import ClosedError, ConnectError, DeadlineExceededError, HandshakeRefusedError, TDServeError
from tdserve.base.tls import PROBE_TIMEOUT_S, TLS, explain_refused
from tdserve.control.content_stream import CHANNEL_KEY, CONTENT_METHOD, SECRET_KEY, SESSION_KEY, ContentStream
from tdserve.control.control_pb2_grpc import ControlServiceStub
from tdserve.control.credentials import open_grpc_channel
from tdserve.control.forking import (
    exclude_forks,
    receive_beside_forks,
    send_beside_forks,
    wait_for_answer,
    watch_forks,
)
from tdserve.control.parts import cut_large
from tdserve.control.silence import HANDSHAKE_S, LOOK_S, SilenceLooks
from tdserve.control.status import MAY_BE_BUSY, NOBODY_THERE, from_rpc_error
from tdserve.v1 import control_pb2

MAX_MESSAGE_BYTES = 256 * 1024 * 1024
"""Largest message that a client receives from its server: specs of a hundred thousand leaves and pages of names fit."""

HANDSHAKE_MS = 5_000
"""Timeout of one attempt to connect, at either end."""

CHANNEL_OPTIONS: list[tuple[str, Any]] = [
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    # A peer that vanished without a FIN is noticed within 20 s.
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 8_000),
    # While a connection is in use, grpc measures it by pings of its own. During such a ping it sends no keepalive, and
    # gives the peer a minute to answer.
    ("grpc.http2.ping_timeout_ms", 12_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    # A server that comes back is found at once: by default grpc waits up to two minutes between two attempts, and 20 s
    # for each attempt. An attempt at a closed port costs both ends next to nothing.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 400),
    ("grpc.min_reconnect_backoff_ms", HANDSHAKE_MS),  # despite its name, grpc's time limit for one attempt
    ("grpc.dns_min_time_between_resolutions_ms", 1_000),
    # Two clients of one process must not share a connection: a fault of one must not affect the other.
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_http_proxy", 0),
]

JOIN_TIMEOUT_S = 5.0
"""Time for the reader of a cancelled stream, or for a channel, to end; they take milliseconds."""

READY_CHECK_S = 5.0
"""A call that waits for a server checks this often whether its name has another address now."""

FIRST_CHECK_S = 1.0
"""After this time a caller logs, once, what it waits for: a wrong port looks like a server that has not started yet."""

RECONNECT_BACKOFF_S = 0.2
"""Pause between two attempts to reach a server that does not answer yet."""


_log = logging.getLogger("tdserve.client")


class SessionStream:
    """The bidirectional stream of one session.

    Args:
        on_message: Called for every message of the server, in order, in the stream's own thread; must not block.
        on_lost: Called once, in that thread, when the stream has ended, with the reason.
    """

    def __init__(
        self,
        open_call: Callable[[Iterator[control_pb2.ClientMessage]], Any],
        *,
        address: str,
        on_message: Callable[[control_pb2.ServerMessage], None],
        on_lost: Callable[[TDServeError], None],
    ) -> None:
        self._address = address
        self._on_message = on_message
        self._on_lost = on_lost
        self._outgoing: SimpleQueue[control_pb2.ClientMessage | None] = SimpleQueue()
        with exclude_forks():
            self._call = open_call(cut_large(send_beside_forks(self._outgoing)))
        self._thread = Thread(target=self._read, name="tdserve-session-reader", daemon=True)
        # Also at the end of the interpreter: a thread that drops a gloo group at that moment aborts the process
        # (measured).
        self._end = weakref.finalize(self, _end_stream, self._call, self._outgoing, self._thread, os.getpid())
        self._thread.start()

    def send(self, message: control_pb2.ClientMessage) -> None:
        """Hands a message to the stream; never blocks. The message is lost if the stream is lost."""
        self._outgoing.put(message)

    def flush(self, timeout_s: float) -> None:
        """Ends sending, and waits at most ``timeout_s`` until the server has received everything and ends the
        stream."""
        self._outgoing.put(None)
        if self._thread is not current_thread():
            self._thread.join(timeout_s)

    def close(self) -> None:
        """Ends the stream and joins its thread (unless called from it). Idempotent."""
        self._end()

    def _read(self) -> None:
        try:
            for message in receive_beside_forks(self._call):
                self._on_message(message)
            lost: TDServeError = ConnectError(address=self._address, reason="the server closed the session")
        except grpc.RpcError as error:
            lost = from_rpc_error(error, address=self._address, what="the session", timeout_s=0.0)
        self._outgoing.put(None)
        self._on_lost(lost)
        # The call is the error that was raised here: by its traceback the end would keep all of a lost session alive.
        self._end.detach()


def _end_stream(call: Any, outgoing: SimpleQueue[control_pb2.ClientMessage | None], thread: Thread, pid: int) -> None:
    if os.getpid() != pid:  # after a fork neither the call nor the thread exists here
        return
    outgoing.put(None)
    with exclude_forks():
        call.cancel()
    if thread is not current_thread():
        thread.join(JOIN_TIMEOUT_S)


class ControlConnection:
    """A channel to the control process.

    Args:
        address: ``host:port``.
        token: Bearer token, sent with every call.
        tls: TLS of the connection; None for none.

    Attributes:
        address: As given, or as ``find_address`` has last returned it.
        find_address: Returns where the server is now; asked while it does not answer. It may raise ConnectError.
    """

    def __init__(self, address: str, *, token: str | None = None, tls: TLS | None = None) -> None:
        self.address = address
        self._tls = tls
        self.find_address: Callable[[], str] = lambda: address
        self._metadata = (("authorization", f"Bearer {token}"),) if token else ()
        self._lock = Lock()
        self._closed = Event()
        self._resolved: list[str] = []
        self._why_unknown = ""
        self._has_warned = False
        self._was_answered = False
        self._silence = SilenceLooks(lambda: (self.address, self._tls))
        self._open_channel()

    def _open_channel(self) -> None:
        with exclude_forks():
            self._channel = open_grpc_channel(self.address, self._tls, CHANNEL_OPTIONS)
        self._tls_version = self._find_tls_version()
        watch_forks()
        self._stub: Any = ControlServiceStub(self._channel)
        self._exchange: Any = self._channel.stream_stream(CONTENT_METHOD, None, None)
        # Made once, not per check: grpc crashes with a segmentation fault if a stub is made for a channel that another
        # thread has closed (measured, 1.85). A call on such a stub raises a ValueError.
        self._health = health_pb2_grpc.HealthStub(self._channel)

    def _resolve(self, timeout_s: float) -> None:
        """Waits until the server's name resolves; replaces a channel whose addresses are no longer those of the name.

        After a failure grpc itself resolves a name again after pauses that grow to two minutes, and has no setting for
        that.

        Raises:
            ConnectError: The name did not resolve in time.
        """
        before = self.address
        if self._resolved:  # it was reached before, and may be elsewhere by now
            with suppress(ConnectError):
                self.address = self.find_address()
        found = resolve(self.address, timeout_s=timeout_s, given_up=self._closed, on_unknown=self._on_unknown)
        self._why_unknown = ""
        with self._lock:
            is_elsewhere = self.address != before or (self._resolved and self._resolved != found)
            is_elsewhere = is_elsewhere or self._tls_version != self._find_tls_version()
            if is_elsewhere and not self._closed.is_set():
                self._open_channel()  # the old one ends with the last call that uses it
            self._resolved = found

    def _find_tls_version(self) -> tuple[int, ...]:
        return () if self._tls is None else self._tls.find_version()

    def _on_unknown(self, reason: str) -> None:
        self._why_unknown = reason
        self._warn(reason)

    def explain_silence(self, waited_s: float, look_s: float = LOOK_S) -> str:
        """Returns why there was no answer for so long, as far as this end can find out within ``look_s``, and what to
        check."""
        waited = f"for {round(waited_s, 1 if waited_s >= 1 else 2):g} s"
        if self._why_unknown:
            return f"{self._why_unknown}, {waited}"
        try:
            os.close(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
        except OSError as error:  # grpc gives no other sign of a process that may open no more files
            return f"this process may not open a socket: {str(error.strerror).lower()} (ulimit -n)"
        found = self._silence.find(look_s)
        if found.refusal:
            return found.refusal
        if found.why:
            return f"{found.why} {waited}; {NOBODY_THERE}"
        return f"it listens there and does not answer {waited}; {MAY_BE_BUSY}"

    def _check_refused(self, cause: BaseException, timeout_s: float) -> None:
        """Raises HandshakeRefusedError if the server refuses this client's handshake, which waiting does not change.
        Once it was answered, the connection waits: certificates may be about to be replaced."""
        probe_s = min(PROBE_TIMEOUT_S, timeout_s)
        if self._was_answered or probe_s <= 0:
            return
        if refusal := explain_refused(self.address, self._tls, timeout_s=probe_s):
            raise HandshakeRefusedError(address=self.address, reason=refusal) from cause

    def _warn(self, why: str) -> None:
        """Logs what a caller waits for; once, until a call is answered."""
        if not self._has_warned:
            self._has_warned = True
            _log.warning("no server answers at %s yet: %s", self.address, why)

    def call(self, method: str, request: Any, *, timeout_s: float, grace_s: float | None = None) -> Any:
        """Makes a unary call; retries until the time is over if no server listens yet.

        Args:
            grace_s: Seconds beyond ``timeout_s`` for the answer; None is the grace of a call that has this timeout.

        Raises:
            ConnectError: No connection within ``timeout_s``. Nothing was changed.
            HandshakeRefusedError: The server, which was never reached, refuses the handshake. Nothing was changed.
            DeadlineExceededError: No answer within it; it is unknown whether anything was changed.
            TDServeError: The error that the server sent.
        """
        deadline = time.monotonic() + timeout_s
        if not self._resolved:
            self._resolve(timeout_s)
        while True:
            remaining_s = deadline - time.monotonic()
            try:
                # Some extra time, so that the server's answer "not within your timeout" arrives before our own.
                patience_s = max(remaining_s, 0.0) + (compute_grace_s(timeout_s) if grace_s is None else grace_s)
                return self._ask(method, request, patience_s)
            except (grpc.RpcError, ValueError) as error:
                ours = self._convert_error(error, what=method, timeout_s=timeout_s)
            # An answer about shared memory or NCCL would be the same the next time.
            if not isinstance(ours, ConnectError) or not ours.retryable:
                raise ours
            self._check_refused(ours, deadline - time.monotonic())
            if remaining_s < RECONNECT_BACKOFF_S:
                raise ours
            time.sleep(RECONNECT_BACKOFF_S)
            self._resolve(max(deadline - time.monotonic(), 0.0))

    def _ask(self, method: str, request: Any, timeout_s: float) -> Any:
        answer = wait_for_answer(getattr(self._stub, method), request, timeout=timeout_s, metadata=self._metadata)
        self._was_answered = True
        return answer

    def wait_ready(self, timeout_s: float) -> None:
        """Waits until the server accepts connections.

        Raises:
            ConnectError: Not within ``timeout_s``.
            HandshakeRefusedError: It was never reached, and refuses the handshake.
        """
        # Not grpc.channel_ready_future: its thread polls for another 0.2 s, and dies with a traceback on stderr if the
        # channel is closed before.
        deadline = time.monotonic() + timeout_s
        while True:
            self._resolve(max(deadline - time.monotonic(), 0.0))
            remaining_s = max(deadline - time.monotonic(), 0.0)
            try:
                check_s = min(remaining_s, READY_CHECK_S if self._has_warned else FIRST_CHECK_S)
                wait_for_answer(
                    self._health.Check, health_pb2.HealthCheckRequest(), timeout=check_s, wait_for_ready=True
                )
                self._has_warned, self._was_answered = False, True
                return
            except (grpc.RpcError, ValueError) as error:
                ours = self._convert_error(error, what="the health check", timeout_s=timeout_s)
                if not isinstance(ours, (ConnectError, DeadlineExceededError)):
                    self._was_answered = True
                    return  # any error is an answer; the session will report it
                is_over = remaining_s <= check_s
                why = self.explain_silence(timeout_s if is_over else check_s)
                if is_over:
                    raise ConnectError(address=self.address, reason=why) from error
                self._check_refused(error, remaining_s - check_s)
                self._warn(why)

    def open_session(
        self, *, on_message: Callable[[control_pb2.ServerMessage], None], on_lost: Callable[[TDServeError], None]
    ) -> SessionStream:
        """Opens the stream of a session; the caller sends Hello first."""
        try:
            return SessionStream(
                lambda outgoing: self._stub.Session(outgoing, metadata=self._metadata),
                address=self.address,
                on_message=on_message,
                on_lost=on_lost,
            )
        except ValueError as error:
            raise self._convert_error(error, what="the session", timeout_s=0.0) from error

    def open_content(self, session: int, channel_number: int, secret: bytes) -> ContentStream:
        """Opens the stream of a session's channel for content."""
        own = ((SESSION_KEY, str(session)), (CHANNEL_KEY, str(channel_number)), (SECRET_KEY, secret))
        try:
            return ContentStream(
                lambda outgoing: self._exchange(outgoing, metadata=(*self._metadata, *own)), address=self.address
            )
        except ValueError as error:
            raise self._convert_error(error, what="the content", timeout_s=0.0) from error

    def close(self) -> None:
        """Ends the channel and all its calls. Idempotent."""
        with self._lock:
            was_closed, channel = self._closed.is_set(), self._channel
            self._closed.set()
        if not was_closed:
            _close(channel)

    def _convert_error(self, error: grpc.RpcError | ValueError, *, what: str, timeout_s: float) -> TDServeError:
        """Converts grpc's error to ours; a call on a channel that another thread has closed raises either type.

        Raises:
            ClosedError: This connection is closed.
            ValueError: It is not closed: a bug of ours.
        """
        if self._closed.is_set():
            raise ClosedError(what=f"the client of {self.address}") from error
        if isinstance(error, ValueError):
            raise error
        return from_rpc_error(error, address=self.address, what=what, timeout_s=timeout_s)


def _close(channel: grpc.Channel) -> None:
    """Closes a channel, but waits no longer than that usually takes: grpc waits for threads of its own, and in a fork
    of a process that was in a call they hang for ever."""

    def close() -> None:
        with exclude_forks():
            channel.close()

    thread = Thread(target=close, name="tdserve-channel-close", daemon=True)
    try:
        thread.start()
    except RuntimeError:  # at the end of the interpreter no thread can start
        close()
        return
    thread.join(JOIN_TIMEOUT_S)


def check_health(address: str, *, timeout_s: float, tls: TLS | None = None) -> bool:
    """Returns whether the server at ``address`` reports SERVING; asks the standard gRPC health service, which needs no
    token.

    Raises:
        ConnectError: There is no answer, or the name does not resolve.
        DeadlineExceededError: No answer in time.
    """
    resolve(address)
    with open_grpc_channel(address, tls, CHANNEL_OPTIONS) as channel:
        try:
            answer = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=timeout_s)
        except grpc.RpcError as error:
            ours = from_rpc_error(error, address=address, what="the health check", timeout_s=timeout_s)
            if isinstance(ours, ConnectError) and (why := explain_refused(address, tls, timeout_s=HANDSHAKE_S)):
                raise HandshakeRefusedError(address=address, reason=why) from error
            if isinstance(ours, (ConnectError, DeadlineExceededError)):
                raise ours from error
            return False
    return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)
