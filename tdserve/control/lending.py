"""Descriptors lent to local clients that may not enter the server's root.

The server opens what they ask for, and passes the descriptor over a UNIX socket that has no name in the file system:
whoever shares the server's network namespace can connect, and needs the key of a session.

From a folder, a process with the rights of root reaches all above it, out of its own container into the server's. So
who borrows shows a descriptor of its ``/``: only a process of the server's mount namespace has one of the same.
"""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from google.protobuf.message import DecodeError

from tdserve.base.errors import ConnectError, NotSupportedError, TDServeError
from tdserve.control.status import decode_failure, encode_failure
from tdserve.v1 import control_pb2

TIMEOUT_S = 5.0
"""Time for a connection to ask, and for the server to answer: it opens one folder."""

PAUSE_S = 1.0
"""Time until connections are accepted again after the process has run out of descriptors."""

MAX_ASKING = 64
"""Connections that have not asked yet; one more closes the oldest."""

_MAX_BYTES = 4096
_CREDENTIALS = struct.Struct("3i")

Lend = Callable[[control_pb2.Borrow, int], int]


class Lender:
    """The server's end, on the event loop of the control process.

    Args:
        nonce: Of the root; names the socket.
        lend: Returns the descriptor that a process of a user gets, and that is then closed here.

    Raises:
        OSError: There can be no such socket, or mount namespaces cannot be told apart.
    """

    def __init__(self, nonce: str, lend: Lend) -> None:
        self._lend = lend
        self._loop = asyncio.get_running_loop()
        self._asking: dict[socket.socket, asyncio.TimerHandle] = {}
        self._pause: asyncio.TimerHandle | None = None
        with _open_top() as top:
            self._here = _identify(top)
        self._listening = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
        try:
            self._listening.bind(_make_name(nonce))
            self._listening.listen(MAX_ASKING)
        except OSError:
            self._listening.close()
            raise
        self._loop.add_reader(self._listening, self._accept)

    def close(self) -> None:
        """Stops listening, and closes all connections. Idempotent."""
        if self._listening.fileno() < 0:
            return
        if self._pause is not None:
            self._pause.cancel()
        self._loop.remove_reader(self._listening)
        self._listening.close()
        for connection in list(self._asking):
            self._close(connection)

    def _accept(self) -> None:
        try:
            connection, _ = self._listening.accept()
        except BlockingIOError:  # it went away again
            return
        except OSError:  # there are no descriptors: it would be accepted again and again
            self._loop.remove_reader(self._listening)
            self._pause = self._loop.call_later(PAUSE_S, self._loop.add_reader, self._listening, self._accept)
            return
        connection.setblocking(False)
        if len(self._asking) >= MAX_ASKING:
            self._close(next(iter(self._asking)))
        self._asking[connection] = self._loop.call_later(TIMEOUT_S, self._close, connection)
        self._loop.add_reader(connection, self._answer, connection)

    def _answer(self, connection: socket.socket) -> None:
        with suppress(OSError, DecodeError):
            content, fds, _, _ = socket.recv_fds(connection, _MAX_BYTES, 1)
            try:
                is_here = bool(fds) and _identify(fds[0]) == self._here
            finally:
                for fd in fds:
                    os.close(fd)
            borrow = control_pb2.Borrow.FromString(content)
            credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
            try:
                if not is_here:
                    reason = "this process sees other file systems than the server"
                    raise NotSupportedError(feature="lending files", reason=reason)
                lent = self._lend(borrow, _CREDENTIALS.unpack(credentials)[1])
            except TDServeError as error:
                connection.send(control_pb2.Borrowed(failure=encode_failure(error)).SerializeToString())
            else:
                try:
                    socket.send_fds(connection, [control_pb2.Borrowed(is_lent=True).SerializeToString()], [lent])
                finally:
                    os.close(lent)
        self._close(connection)

    def _close(self, connection: socket.socket) -> None:
        if (timer := self._asking.pop(connection, None)) is not None:
            timer.cancel()
            self._loop.remove_reader(connection)
            connection.close()


def borrow(nonce: str, asked: control_pb2.Borrow) -> int:
    """Returns a descriptor of the server, which the caller closes. Threads: safe.

    Raises:
        ConnectError: No server of this nonce can be reached from here, or it does not answer.
        TDServeError: Why the server does not lend it.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC) as connection:
        connection.settimeout(TIMEOUT_S)
        try:
            connection.connect(_make_name(nonce))
            with _open_top() as top:
                socket.send_fds(connection, [asked.SerializeToString()], [top])
            content, fds, _, _ = socket.recv_fds(connection, _MAX_BYTES, 1)
            answer = control_pb2.Borrowed.FromString(content)
        except (OSError, DecodeError) as error:
            raise ConnectError(address="the server's lender of folders", reason=str(error)) from error
    if fds:
        os.set_inheritable(fds[0], False)  # Python gives recv_fds no flags
        return fds[0]
    if answer.HasField("failure"):
        raise decode_failure(answer.failure)
    raise ConnectError(address="the server's lender of folders", reason="it has closed the connection")


def _make_name(nonce: str) -> str:
    return f"\0tdserve-{nonce}"


@contextmanager
def _open_top() -> Iterator[int]:
    fd = os.open("/", os.O_PATH | os.O_CLOEXEC)
    try:
        yield fd
    finally:
        os.close(fd)


def _identify(fd: int) -> tuple[str, int]:
    """Returns what no other folder of any mount namespace has: the number of its mount, and its inode.

    Raises:
        OSError: This kernel, or sandbox, does not number mounts.
    """
    with open(f"/proc/self/fdinfo/{fd}", encoding="ascii") as facts:
        mount = next((line for line in facts if line.startswith("mnt_id:")), "")
    if not mount:
        raise OSError(errno.ENOSYS, "mounts have no numbers here")
    return mount, os.fstat(fd).st_ino
