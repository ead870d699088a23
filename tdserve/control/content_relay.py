"""The server's end of the gRPC streams that carry content: it relays bytes between a client and a socket, and keeps at
most one message of each direction."""

from __future__ import annotations

import asyncio
import socket
from contextlib import suppress
from typing import Any

import grpc

from tdserve.base.errors import RemoteProtocolError
from tdserve.control.content_stream import CHANNEL_KEY, SECRET_KEY, SESSION_KEY

MAX_MESSAGE_BYTES = 1024 * 1024
"""Largest message to a client. The event loop copies one at a time: some 200 microseconds in which it serves nothing
else."""


_EOF: Any = grpc.aio.EOF  # type: ignore[attr-defined]


class ContentConnection:
    """One call of a client that exchanges content.

    Attributes:
        session: Number of the session that it names.
        channel_number: Number of the session's channel.
        secret: The secret that it gives, which is to be compared with the session's.

    Raises:
        RemoteProtocolError: It does not name them.
    """

    def __init__(self, context: Any) -> None:
        self._context = context
        given = dict(context.invocation_metadata() or ())
        try:
            self.session, self.channel_number = int(given[SESSION_KEY]), int(given[CHANNEL_KEY])
            self.secret = bytes(given[SECRET_KEY])
        except (KeyError, ValueError, TypeError) as error:
            raise RemoteProtocolError(expected="a session, a channel and its secret", received="none") from error

    async def relay(self, connection: socket.socket) -> str:
        """Relays bytes both ways until one end stops, or this coroutine is cancelled; closes the socket.

        Returns:
            Which end has stopped.
        """
        connection.setblocking(False)
        ways = [
            asyncio.create_task(self._relay_up(connection), name="tdserve-content-up"),
            asyncio.create_task(self._relay_down(connection), name="tdserve-content-down"),
        ]
        try:
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
            return next(way.result() for way in ways if way.done())
        finally:
            for way in ways:
                way.cancel()
            with connection:  # also if this is cancelled once more
                # After the call has ended, grpc.aio crashes the process: no task may use it then.
                await asyncio.gather(*ways, return_exceptions=True)

    async def _relay_up(self, connection: socket.socket) -> str:
        """Passes on what the client sends. Once the data worker takes no more, it is dropped until the other way has
        noticed that, too: a call whose end is sent while nothing reads its messages may not end at a client that goes
        on sending (grpc 1.85)."""
        loop, is_taken = asyncio.get_running_loop(), True
        with suppress(grpc.RpcError, grpc.aio.BaseError, asyncio.InvalidStateError):
            while (message := await self._context.read()) is not _EOF:
                try:
                    if is_taken:
                        await loop.sock_sendall(connection, message)
                except OSError:
                    is_taken = False
        return "its client has closed it"

    async def _relay_down(self, connection: socket.socket) -> str:
        loop = asyncio.get_running_loop()
        try:
            while message := await loop.sock_recv(connection, MAX_MESSAGE_BYTES):
                try:
                    await self._context.write(message)
                except (grpc.RpcError, grpc.aio.BaseError, asyncio.InvalidStateError):
                    return "its client has closed it"
        except OSError:
            pass
        return "its data worker has closed it"
