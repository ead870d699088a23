"""Descriptors lent to local clients that may not enter the server's root.

The server opens what they ask for, and passes the descriptor over a UNIX socket that has no name in the file system:
any process in the server's network namespace can connect, and needs the key of a session.

From a folder, a process with the rights of root reaches all above it, out of its own container into the server's. So
only a process of the server's mount namespace is lent one. The kernel names the process; its mounts have numbers that
those of other namespaces do not have.

The receiver must close a descriptor that comes with a message, and its sender can make that take arbitrarily long. So
no socket takes any, and where the kernel cannot refuse them (Linux before 6.16), nothing is lent.
"""

from __future__ import annotations

import asyncio
import os
import select
import socket
import struct
from collections.abc import Callable
from contextlib import suppress

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
_SO_PEERPIDFD, _SO_PASSRIGHTS = 77, 83  # Linux 6.5, 6.16; not in Python's socket module yet

Lend = Callable[[control_pb2.Borrow, int], int]


class Lender:
    """The server's end, on the event loop of the control process.

    Args:
        nonce: Nonce of the root; names the socket.
        lend: Returns the descriptor that a process of a user gets, and that is then closed here.

    Raises:
        OSError: There can be no such socket, or the kernel is too old.
        NotSupportedError: The ``/`` of this process is no mount.
    """

    def __init__(self, nonce: str, lend: Lend) -> None:
        self._lend = lend
        self._loop = asyncio.get_running_loop()
        self._asking: dict[socket.socket, asyncio.TimerHandle] = {}
        self._pause: asyncio.TimerHandle | None = None
        self._here = _find_top_mount("self")
        self._listening = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
        try:
            refuse_descriptors(self._listening)
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
            borrow = control_pb2.Borrow.FromString(connection.recv(_MAX_BYTES))
            credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
            pid, uid, _ = _CREDENTIALS.unpack(credentials)
            try:
                if not _is_below(connection, pid, self._here):
                    reason = "this process sees other file systems than the server"
                    raise NotSupportedError(feature="lending files", reason=reason)
                lent = self._lend(borrow, uid)
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
            connection.send(asked.SerializeToString())
            content, fds, _, _ = socket.recv_fds(connection, _MAX_BYTES, 1)
            answer = control_pb2.Borrowed.FromString(content)
        except (OSError, DecodeError) as error:
            reason = f"the server does not answer whether it lends files to this process: {error}"
            raise ConnectError(address="the server's lender of folders", reason=reason) from error
    if fds:
        os.set_inheritable(fds[0], False)  # Python gives recv_fds no flags
        return fds[0]
    if answer.HasField("failure"):
        raise decode_failure(answer.failure)
    reason = "the server lends no files to this process now: it has closed the connection"
    raise ConnectError(address="the server's lender of folders", reason=reason)


def _make_name(nonce: str) -> str:
    return f"\0tdserve-{nonce}"


def refuse_descriptors(connection: socket.socket) -> None:
    """Has the kernel refuse to pass descriptors to a UNIX socket, and to what it accepts.

    Raises:
        OSError: It cannot.
    """
    connection.setsockopt(socket.SOL_SOCKET, _SO_PASSRIGHTS, 0)


def _is_below(connection: socket.socket, pid: int, top_mount: str) -> bool:
    """Returns whether the process that has connected sees this mount as its ``/``, so that it is of the mount namespace
    of this one."""
    pidfd = connection.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD)
    try:
        found = _find_top_mount(str(pid))
        alive = select.poll()
        alive.register(pidfd, select.POLLIN)
        return found == top_mount and not alive.poll(0)  # otherwise the number may be another process's by now
    finally:
        os.close(pidfd)


def _find_top_mount(process: str) -> str:
    """Returns the number of the mount that a process sees as ``/``: that of another mount namespace has another.

    Raises:
        OSError: There is no such process.
        NotSupportedError: Its ``/`` is no mount.
    """
    with open(f"/proc/{process}/mountinfo", encoding="utf-8", errors="surrogateescape") as mounts:
        tops = [fields[0] for fields in map(str.split, mounts) if fields[4] == "/"]
    if not tops:
        raise NotSupportedError(feature="lending files", reason="its / is no mount")
    return tops[-1]  # which covers the others
