"""Byte streams over which a stream channel moves its messages: the contract, and the one over a UNIX socket."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from contextlib import suppress
from threading import Lock
from typing import Protocol

from tdserve.base.errors import PeerLostError

SOCKET_BUFFER_BYTES = 4 * 1024 * 1024
"""Asked of the kernel for a socket that carries content; it grants what ``net.core.wmem_max`` allows. With more bytes
in the socket its two processes switch less often."""


class ByteStream(Protocol):
    """Two ordered streams of bytes, one each way. Threads: one reads, one writes, any may close."""

    def read_into(self, place: memoryview) -> None:
        """Fills a place with the next bytes; blocks.

        Raises:
            PeerLostError: The stream has ended. The place is undefined.
        """

    def write(self, pieces: Sequence[memoryview]) -> None:
        """Writes pieces, one behind the other; blocks while the other end takes nothing. The pieces may change
        afterwards.

        Raises:
            PeerLostError: The stream has ended.
        """

    def close(self) -> None:
        """Ends both streams, and all that waits for them. Idempotent."""


class SocketStream:
    """The byte streams of a connected UNIX socket, which it owns from now on.

    Args:
        connection: The socket.
        peer: Name of the other end, for errors.
    """

    def __init__(self, connection: socket.socket, *, peer: str) -> None:
        connection.setblocking(True)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SOCKET_BUFFER_BYTES)
        self._connection = connection
        self._peer = peer
        self._lock = Lock()
        self._num_users = 0
        self._is_closed = False

    def read_into(self, place: memoryview) -> None:
        """See ByteStream."""
        with _Use(self) as connection:
            at = 0
            while at < len(place):
                num = connection.recv_into(place[at:])
                if not num:
                    raise ConnectionResetError("it has ended")
                at += num

    def write(self, pieces: Sequence[memoryview]) -> None:
        """See ByteStream."""
        with _Use(self) as connection:
            rest = [piece for piece in pieces if len(piece)]
            while rest:
                num = connection.sendmsg(rest)
                while rest and num >= len(rest[0]):
                    num -= len(rest.pop(0))
                if rest:
                    rest[0] = rest[0][num:]

    def close(self) -> None:
        """See ByteStream."""
        with self._lock:
            was_closed, self._is_closed = self._is_closed, True
            if not was_closed:
                with suppress(OSError):
                    self._connection.shutdown(socket.SHUT_RDWR)
            self._close_unused()

    def enter(self) -> socket.socket:
        """Returns the socket, which stays open until ``leave``: its number must not become another file's meanwhile."""
        with self._lock:
            if self._is_closed:
                raise ConnectionResetError("it is closed")
            self._num_users += 1
            return self._connection

    def leave(self) -> None:
        """Ends a use of the socket."""
        with self._lock:
            self._num_users -= 1
            self._close_unused()

    def make_lost_error(self, fault: OSError) -> PeerLostError:
        """Returns our error for the socket's."""
        reason = "the stream is closed" if self._is_closed else _explain_fault(fault)
        return PeerLostError(peer=self._peer, reason=reason)

    def _close_unused(self) -> None:
        if self._is_closed and not self._num_users:
            self._connection.close()


class _Use:
    """One use of a socket, whose errors become ours."""

    def __init__(self, stream: SocketStream) -> None:
        self._stream = stream

    def __enter__(self) -> socket.socket:
        try:
            return self._stream.enter()
        except OSError as fault:
            raise self._stream.make_lost_error(fault) from fault

    def __exit__(self, kind: object, fault: BaseException | None, trace: object) -> None:
        self._stream.leave()
        if isinstance(fault, OSError):
            raise self._stream.make_lost_error(fault) from fault


def _explain_fault(fault: OSError) -> str:
    return os.strerror(fault.errno) if fault.errno else str(fault)
