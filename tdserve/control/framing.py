"""Frames on a UNIX socket between the control process and a data worker: a length (uint32, little endian), then a
message."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from collections import deque
from collections.abc import Callable
from threading import Lock
from typing import cast

from tdserve.base.errors import PeerLostError, RemoteProtocolError, TooLargeError
from tdserve.v1 import worker_pb2

_LENGTH = struct.Struct("<I")

HANDED_SOCKET = struct.Struct("<QI")
"""Session and channel of a socket that control hands to a data worker; the descriptor comes along."""

MAX_FRAME_BYTES = 1 << 30
"""Far above any order: the rows of the largest sample with all columns, a spec with a hundred thousand leaves, inline
content."""

_PIECE_BYTES = 1 << 18
"""Bytes of a long frame that are handed to the loop's transport at a time, which copies them."""


class FrameReader:
    """Cuts a byte stream into frames as it arrives.

    Args:
        max_bytes: Largest frame that is accepted.

    Attributes:
        max_bytes: Largest frame that is accepted; may be raised at any time.
    """

    def __init__(self, max_bytes: int = MAX_FRAME_BYTES) -> None:
        self.max_bytes = max_bytes
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """Returns the frames that are complete now."""
        self._buffer += data
        frames, at = [], 0
        while len(self._buffer) - at >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._buffer, at)
            if length > self.max_bytes:
                raise RemoteProtocolError(expected=f"a frame of at most {self.max_bytes} bytes", received=f"{length}")
            if len(self._buffer) - at - _LENGTH.size < length:
                break
            at += _LENGTH.size
            frames.append(bytes(self._buffer[at : at + length]))
            at += length
        del self._buffer[:at]
        return frames


def frame(content: bytes) -> bytes:
    """Returns the frame of a message."""
    return _LENGTH.pack(len(content)) + content


class FrameWriter:
    """Writes frames to a transport of the event loop, a long one a piece at a time: the transport copies what it is
    handed, and what the socket does not take it moves again."""

    def __init__(self) -> None:
        self._transport: asyncio.WriteTransport | None = None
        self._is_paused = False
        self._waiting: deque[bytes | memoryview] = deque()

    def open(self, transport: asyncio.WriteTransport) -> None:
        """Begins to write."""
        self._transport = transport

    def close(self) -> None:
        """Drops what was not written yet: the other end is gone."""
        self._transport = None
        self._waiting.clear()

    def write(self, content: bytes, rest: bytes = b"") -> None:
        """Writes the frame of a message, behind those before it; does nothing if the other end is gone.

        Args:
            content: The serialised message.
            rest: More of it, which a reader merges: what is long was serialised in a thread, and is not copied again.

        Raises:
            TooLargeError: It is longer than any frame.
        """
        size = len(content) + len(rest)
        if size > MAX_FRAME_BYTES:
            raise TooLargeError(what="a message that names that many rows, in bytes", asked=size, free=MAX_FRAME_BYTES)
        self.write_frames(_LENGTH.pack(size) + content)
        for start in range(0, len(rest), _PIECE_BYTES):
            self.write_frames(memoryview(rest)[start : start + _PIECE_BYTES])

    def write_frames(self, data: bytes | memoryview) -> None:
        """Writes whole frames, or the next piece of one."""
        if self._is_paused:
            self._waiting.append(data)
        elif self._transport is not None and not self._transport.is_closing():  # asyncio warns of writes to one
            self._transport.write(data)

    def flush(self) -> None:
        """Hands all to the transport, which is closed next."""
        while self._waiting and self._transport is not None:
            self._transport.write(self._waiting.popleft())

    def pause(self) -> None:
        """Called when the transport holds enough."""
        self._is_paused = True

    def resume(self) -> None:
        """Called when the transport takes more."""
        self._is_paused = False
        while self._waiting and not self._is_paused and self._transport is not None:
            self._transport.write(self._waiting.popleft())


class WorkerSocket:
    """The worker's end: blocking, one reader thread, any number of writers."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._reader = FrameReader()
        self._lock = Lock()

    def receive_orders(self) -> list[worker_pb2.Order]:
        """Waits for the next orders. An empty list means that the control process is gone."""
        while True:
            try:
                data = self._connection.recv(1 << 20)
            except OSError:
                return []
            if not data:
                return []
            frames = self._reader.feed(data)
            if frames:
                return [worker_pb2.Order.FromString(content) for content in frames]

    def report(self, report: worker_pb2.Report) -> None:
        """Sends a report. It is silently lost if the control process is gone, which ends this process anyway."""
        data = frame(report.SerializeToString())
        try:
            with self._lock:  # held over a send to a local socket with a reading peer: frames must not mix
                self._connection.sendall(data)
        except OSError:
            return

    def close(self) -> None:
        """Ends the connection; wakes a reader."""
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()


class ControlSocket(asyncio.Protocol):
    """The control process's end, on its event loop.

    Args:
        on_report: Called for every report, on the loop.
        on_lost: Called once when the worker's end is gone.
    """

    def __init__(self, on_report: Callable[[worker_pb2.Report], None], on_lost: Callable[[], None]) -> None:
        self._on_report = on_report
        self._on_lost = on_lost
        self._reader = FrameReader()
        self._transport: asyncio.WriteTransport | None = None
        self._writer = FrameWriter()

    @classmethod
    async def open(
        cls, connection: socket.socket, on_report: Callable[[worker_pb2.Report], None], on_lost: Callable[[], None]
    ) -> ControlSocket:
        """Takes over a connected socket."""
        loop = asyncio.get_running_loop()
        _, protocol = await loop.create_connection(lambda: cls(on_report, on_lost), sock=connection)
        return protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.WriteTransport, transport)
        self._writer.open(self._transport)

    def data_received(self, data: bytes) -> None:
        for content in self._reader.feed(data):
            self._on_report(worker_pb2.Report.FromString(content))

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._writer.close()
        self._on_lost()

    def pause_writing(self) -> None:
        """Stops writing: the worker has more to read than the socket holds."""
        self._writer.pause()

    def resume_writing(self) -> None:
        """Resumes writing: the worker has read enough."""
        self._writer.resume()

    def order(self, order: worker_pb2.Order, rest: bytes = b"") -> None:
        """Sends an order.

        Args:
            order: The order.
            rest: As in :meth:`FrameWriter.write`.

        Raises:
            PeerLostError: The worker is gone.
            TooLargeError: The order is longer than any frame.
        """
        if self._transport is None:
            raise PeerLostError(peer="the data worker", reason="its socket is closed")
        self._writer.write(order.SerializeToString(), rest)

    def close(self) -> None:
        """Ends the connection; the worker then exits."""
        self._writer.flush()
        if self._transport is not None:
            self._transport.close()
