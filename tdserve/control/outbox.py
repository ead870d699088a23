"""Sends on a stream socket whose other end may hang: then a thread sends, and no caller waits for it."""

from __future__ import annotations

import contextlib
import select
import socket
import time
from collections import deque
from threading import Lock, Thread

from tdserve.base.errors import ConnectError

PATIENCE_S = 0.05
"""How long a caller waits for the other end to read. A process that runs reads sooner; a thread would cost more."""

MAX_HELD_BYTES = 64 * 1024 * 1024
"""Bytes that wait for an end that reads nothing. Beyond it the connection ends, as the session's messages are lost."""


class Outbox:
    """Sends bytes in order. Threads: safe; the callers' deadlines hold, since none of them waits for the other end.

    Args:
        connection: A blocking stream socket, whose owner closes it after ``join``.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._lock = Lock()
        self._held: deque[memoryview] = deque()
        self._held_nbytes = 0
        self._thread: Thread | None = None

    def send(self, content: bytes) -> None:
        """Sends bytes, at once if the other end reads; else they are sent later, or not at all if the connection ends.

        Raises:
            OSError: The connection has ended.
            ConnectError: Too many bytes wait. It was shut down.
        """
        with self._lock:  # bytes of two callers must not mix
            rest = memoryview(content) if self._held else self._send_now(content)
            if not rest:
                return
            if self._held_nbytes + len(rest) > MAX_HELD_BYTES:
                self._shut_down()
                reason = f"the server reads nothing while {MAX_HELD_BYTES >> 20} MiB wait for it"
                raise ConnectError(address="the local socket", reason=reason)
            self._held.append(rest)
            self._held_nbytes += len(rest)
            if self._thread is None:
                self._thread = Thread(target=self._send_held, name="tdserve-local-outbox", daemon=True)
                self._thread.start()

    def join(self, timeout_s: float | None = None) -> None:
        """Waits until nothing is held any more: it was sent, or the connection has ended."""
        thread = self._thread
        if thread is not None:
            thread.join(timeout_s)

    def _send_now(self, content: bytes) -> memoryview:
        """Sends what the other end takes within the patience; returns the rest."""
        rest, end_s = memoryview(content), 0.0
        while rest:
            try:
                rest = rest[self._socket.send(rest, socket.MSG_DONTWAIT) :]
            except BlockingIOError:
                now_s = time.monotonic()
                end_s = end_s or now_s + PATIENCE_S
                poll = select.poll()
                poll.register(self._socket, select.POLLOUT)
                if now_s >= end_s or not poll.poll((end_s - now_s) * 1000):
                    break
        return rest

    def _send_held(self) -> None:
        while True:
            with self._lock:
                if not self._held:
                    self._thread = None
                    return
                content = self._held[0]
            try:
                self._socket.sendall(content)
            except OSError:  # the connection has ended, as its reader finds too
                with self._lock:
                    self._held.clear()
                    self._held_nbytes, self._thread = 0, None
                return
            with self._lock:
                self._held.popleft()
                self._held_nbytes -= len(content)

    def _shut_down(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
