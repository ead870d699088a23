"""The local socket: messages of sessions whose client runs on the server's machine, without gRPC in between.

The UNIX socket lies in the root folder, so a process that sees the files can connect. Frames are those of ``framing``.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Thread, current_thread
from typing import cast

from google.protobuf.message import DecodeError

from tdserve.base.errors import ConnectError, RemoteProtocolError, TDServeError
from tdserve.control.framing import FrameReader, FrameWriter, frame
from tdserve.control.lending import refuse_descriptors
from tdserve.control.outbox import Outbox
from tdserve.control.parts import MAX_RECEIVED_BYTES, PART_BYTES, cut_large
from tdserve.v1 import control_pb2

SOCKET_NAME = "control.sock"

ATTACH_TIMEOUT_S = 5.0
"""Time for a connection to identify its session, and for the server to check one file."""

MAX_STRANGER_FRAME_BYTES = 4096
"""Largest frame of a connection that has not identified its session: Attach takes less than a hundred bytes."""

MAX_STRANGERS = 64
"""Connections that have not identified their session yet. One more closes the oldest, since identification takes
milliseconds."""

_RECEIVE_BYTES = 1 << 18

MAX_REST_READS = 64
"""Most reads at the end of a connection: a client that continues sending must not hold up the others."""


class LocalConnection(asyncio.Protocol):
    """The control process's end of one connection, on its event loop.

    Args:
        on_message: Called with this connection for every message.
        on_lost: Called with this connection once the client's end is gone.
        strangers: Connections of the same server that belong to no session yet, in order of arrival; None if this is
            the only one.
    """

    def __init__(
        self,
        on_message: Callable[[LocalConnection, control_pb2.ClientMessage], None],
        on_lost: Callable[[LocalConnection], None],
        strangers: dict[LocalConnection, None] | None = None,
    ) -> None:
        self._on_message = on_message
        self._on_lost = on_lost
        self._strangers = {} if strangers is None else strangers
        self._reader = FrameReader(MAX_STRANGER_FRAME_BYTES)
        self._transport: asyncio.WriteTransport | None = None
        self._writer = FrameWriter()
        self._held: list[bytes] | None = None  # frames that leave together, while messages are taken in

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.WriteTransport, transport)
        self._writer.open(self._transport)
        self._strangers[self] = None
        if len(self._strangers) > MAX_STRANGERS:
            next(iter(self._strangers)).close()
        asyncio.get_running_loop().call_later(ATTACH_TIMEOUT_S, self._close_stranger)

    def let_in(self) -> None:
        """Admits the client, which has identified its session: the connection stays, and may receive large messages."""
        self._strangers.pop(self, None)
        self._reader.max_bytes = MAX_RECEIVED_BYTES

    def data_received(self, data: bytes) -> None:
        self._held = []
        try:
            for content in self._reader.feed(data):
                self._on_message(self, control_pb2.ClientMessage.FromString(content))
        except (DecodeError, RemoteProtocolError):
            self.close()
        finally:
            self._let_go()

    def pause_writing(self) -> None:
        """Called when the client does not read what it is sent: it may not send requests meanwhile."""
        self._writer.pause()
        if self._transport is not None:
            cast(asyncio.Transport, self._transport).pause_reading()

    def resume_writing(self) -> None:
        """Called when the client has read."""
        self._writer.resume()
        if self._transport is not None:
            cast(asyncio.Transport, self._transport).resume_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        self._writer.close()
        self._strangers.pop(self, None)
        self._on_lost(self)
        self._transport = None

    def read_rest(self) -> None:
        """Handles what the client has sent and this end has not read yet. A client that sends its last messages and
        hangs up may otherwise not be heard: the loop stops to read once something cannot be sent to it."""
        named = None if self._transport is None else self._transport.get_extra_info("socket")
        if named is None or named.fileno() < 0:
            return
        with contextlib.suppress(OSError), named.dup() as rest:  # all is read, or the connection has failed
            for _ in range(MAX_REST_READS):
                if not (data := rest.recv(_RECEIVE_BYTES, socket.MSG_DONTWAIT)):
                    break
                self.data_received(data)

    def send(self, message: control_pb2.ServerMessage, rest: bytes = b"") -> None:
        """Sends a message; does nothing when the client is gone. ``rest``, and errors, as in
        :meth:`FrameWriter.write`."""
        if rest:
            self._let_go()
            self._writer.write(message.SerializeToString(), rest)
        elif self._held is not None:
            self._held.append(frame(message.SerializeToString()))
        else:
            self._writer.write(message.SerializeToString())

    def _let_go(self) -> None:
        held, self._held = self._held, None
        if held:
            self._writer.write_frames(b"".join(held))

    def close(self) -> None:
        """Ends the connection."""
        self._strangers.pop(self, None)
        self._let_go()
        self._writer.flush()
        if self._transport is not None:
            self._transport.close()

    def _close_stranger(self) -> None:
        if self in self._strangers:
            self.close()


async def listen(root: Path, make_connection: Callable[[], LocalConnection]) -> asyncio.AbstractServer:
    """Listens in the root folder, and replaces the socket of a server that is gone.

    Any process that sees the socket may connect: a session needs the key that it got over gRPC.

    Args:
        root: The folder.
        make_connection: Makes this end of each connection.

    Raises:
        OSError: The folder takes no socket.
    """
    with _make_short_name(root) as path:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
        bound = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        with contextlib.suppress(OSError):  # an older kernel
            refuse_descriptors(bound)
        try:
            bound.bind(path)
            os.chmod(path, 0o666)  # noqa: S103 (see above)
        except OSError:
            bound.close()
            raise
    loop = asyncio.get_running_loop()
    server = await loop.create_unix_server(make_connection, sock=bound, start_serving=False)
    try:
        await server.start_serving()
    except BaseException:  # the server is being stopped
        server.close()
        raise
    return server


def connect(root: Path) -> socket.socket:
    """Connects to the server of a root folder.

    Raises:
        ConnectError: No server listens there, or this process may not connect.
    """
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        with _make_short_name(root) as path:
            connection.connect(path)
    except OSError as error:
        connection.close()
        raise ConnectError(address=str(root / SOCKET_NAME), reason=error.strerror or str(error)) from error
    return connection


class SocketEnd:
    """The client's end, with any number of writers and one reading thread.

    Args:
        connection: A connection to the server.
        on_message: Called for every message, in the reading thread; a callback that takes long there may call ``look``.
        on_end: Called at the end of that thread, whatever ended it.
    """

    def __init__(
        self,
        connection: socket.socket,
        *,
        on_message: Callable[[control_pb2.ServerMessage], None],
        on_end: Callable[[], None],
    ) -> None:
        self._on_message = on_message
        self._on_end = on_end
        self._frames = FrameReader()
        self._waiting: deque[control_pb2.ServerMessage] = deque()
        self._socket = connection
        self._outbox = Outbox(connection)
        self._thread = Thread(target=self._read, name="tdserve-local-socket", daemon=True)

    @property
    def is_reading_here(self) -> bool:
        """Whether the calling thread is the one that reads."""
        return self._thread is current_thread()

    def start(self) -> None:
        """Begins to read."""
        self._thread.start()

    def send(self, message: control_pb2.ClientMessage) -> None:
        """Sends a message, without waiting for a server that hangs.

        Raises:
            ConnectError: The server is gone, or the socket was closed.
        """
        content = message.SerializeToString()
        framed = frame(content)
        if len(content) > PART_BYTES:
            framed = b"".join(frame(part.SerializeToString()) for part in cut_large([message]))
        try:
            self._outbox.send(framed)
        except OSError as error:
            raise ConnectError(address="the local socket", reason=error.strerror or str(error)) from error

    def look(self) -> None:
        """Handles messages that have arrived meanwhile; called within ``on_message``. Messages that grant this client
        something, and later messages of the same requests, wait for their turn."""
        try:
            with contextlib.suppress(BlockingIOError):
                self._receive(socket.MSG_DONTWAIT)
            waiting, self._waiting = self._waiting, deque()
            let_do: set[int] = set()
            while waiting:
                message = waiting.popleft()
                if message.HasField("accepted") or message.request in let_do:
                    let_do.add(message.request)
                    self._waiting.append(message)
                else:
                    self._on_message(message)
        except BaseException:
            self._shut_down()  # later messages cannot be trusted, or were lost
            raise

    def flush(self, timeout_s: float) -> None:
        """Ends sending, and waits at most ``timeout_s`` until the server has received everything and hangs up."""
        end_s = time.monotonic() + timeout_s
        self._outbox.join(timeout_s)
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)
        if self._thread.is_alive() and self._thread is not current_thread():
            self._thread.join(max(end_s - time.monotonic(), 0.0))

    def drop(self) -> None:
        """Closes this process's copy, in a forked child; the parent's connection continues."""
        self._socket.close()

    def close(self) -> None:
        """Ends the connection, and waits until the thread has finished what it is doing. Idempotent."""
        self._shut_down()
        if self._thread.is_alive() and self._thread is not current_thread():
            self._thread.join()
        elif not self._thread.ident:  # it was never started
            self._outbox.join()
            self._socket.close()

    def _shut_down(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def _receive(self, flags: int = 0) -> bool:
        """Receives what has arrived; returns False at the end."""
        data = self._socket.recv(_RECEIVE_BYTES, flags)
        self._waiting.extend(map(control_pb2.ServerMessage.FromString, self._frames.feed(data)))
        return bool(data)

    def _read(self) -> None:
        try:
            while self._receive():
                while self._waiting:
                    self._on_message(self._waiting.popleft())
        except (OSError, DecodeError, TDServeError):
            pass  # the session is over, as on_end reports
        finally:
            self._shut_down()
            self._outbox.join()  # its number may belong to another file once the socket is closed
            self._socket.close()
            self._on_end()


@contextlib.contextmanager
def _make_short_name(root: Path) -> Iterator[str]:
    """Yields a short name of the socket: the kernel takes 107 bytes, and the root's path may be longer."""
    fd = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{fd}/{SOCKET_NAME}"
    finally:
        os.close(fd)
