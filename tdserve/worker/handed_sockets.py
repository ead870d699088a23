"""Sockets that the control process hands to a data worker: the other ends of its clients' streams of content."""

from __future__ import annotations

import os
import socket
import struct
from threading import Lock

from tdserve.base.errors import PeerLostError
from tdserve.control.framing import HANDED_SOCKET
from tdserve.transport.byte_streams import SocketStream


class HandedSockets:
    """Receives them. Threads: safe.

    Args:
        connection: UNIX message socket; its other end is ``tdserve.server.processes.workers.DataWorker``'s.
    """

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self._connection = connection
        self._lock = Lock()
        self._waiting: dict[tuple[int, int], socket.socket] = {}

    def take_stream(self, session: int, channel_number: int) -> SocketStream:
        """Returns the stream of a session's channel, which was handed over before its opening was ordered.

        Raises:
            PeerLostError: It was not: no descriptor was free, or control is gone.
        """
        peer = f"the client of session {session}"
        with self._lock:
            self._receive()
            found = self._waiting.pop((session, channel_number), None)
        if found is None:
            raise PeerLostError(peer=peer, reason="the socket of its stream did not come")
        return SocketStream(found, peer=peer)

    def close(self) -> None:
        """Takes no more, and closes those that no session has taken."""
        with self._lock:
            self._connection.close()
            for waiting in self._waiting.values():
                waiting.close()
            self._waiting.clear()

    def _receive(self) -> None:
        while True:
            try:
                content, fds, _, _ = socket.recv_fds(self._connection, HANDED_SOCKET.size, 1)
            except BlockingIOError:
                return
            except OSError as fault:
                raise PeerLostError(peer="the control process", reason=os.strerror(fault.errno or 0)) from fault
            if not content:
                return
            try:
                session, channel_number = HANDED_SOCKET.unpack(content)
            except struct.error:
                continue
            for fd in fds:
                self._waiting[session, channel_number] = socket.socket(fileno=fd)
