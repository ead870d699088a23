"""The client's end of the gRPC stream that carries content. Its messages are bytes without a meaning here."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterator, Sequence
from queue import SimpleQueue
from threading import Semaphore
from typing import Any

import grpc

from tdserve.base.errors import PeerLostError
from tdserve.control.forking import exclude_forks, receive_beside_forks, send_beside_forks
from tdserve.control.status import from_rpc_error

CONTENT_METHOD = "/tdserve.v1.ContentService/Exchange"
"""Not in the protocol files, since its messages are bytes as they are: parsing would copy them once more."""

SESSION_KEY, CHANNEL_KEY, SECRET_KEY = "tdserve-session", "tdserve-channel", "tdserve-secret-bin"
"""Metadata of the call: the session, the number of its channel, and the session's secret."""

MAX_UNDER_WAY = 2
"""Messages of at most a mebibyte that are handed over to grpc: one is sent, the next is ready."""


class ContentStream:
    """The byte streams of one channel (``tdserve.transport.byte_streams.ByteStream``).

    Args:
        open_call: Begins the call, given its messages.
        address: Address of the server, for errors.
    """

    def __init__(self, open_call: Callable[[Iterator[bytes]], Any], *, address: str) -> None:
        self._address = address
        self._outgoing: SimpleQueue[bytes | None] = SimpleQueue()
        self._room = Semaphore(MAX_UNDER_WAY)
        self._is_closed = False
        with exclude_forks():
            self._call = open_call(send_beside_forks(self._outgoing, self._room.release))
        self._messages = receive_beside_forks(self._call)
        self._message = memoryview(b"")
        self._end = weakref.finalize(self, _end_call, self._call, self._outgoing, os.getpid())

    def read_into(self, place: memoryview) -> None:
        """See ByteStream."""
        at = 0
        while at < len(place):
            if not self._message:
                self._message = self._receive()
            piece = self._message[: len(place) - at]
            place[at : at + len(piece)] = piece
            self._message = self._message[len(piece) :]
            at += len(piece)

    def write(self, pieces: Sequence[memoryview]) -> None:
        """See ByteStream."""
        message = b"".join(pieces)
        self._room.acquire()
        if self._is_closed:
            self._room.release()
            raise self._make_lost_error("it is closed")
        self._outgoing.put(message)

    def close(self) -> None:
        """See ByteStream."""
        self._is_closed = True
        self._room.release()
        self._end()

    def _receive(self) -> memoryview:
        try:
            return memoryview(next(self._messages))
        except StopIteration:
            raise self._make_lost_error("the server has ended it") from None
        except grpc.RpcError as error:
            reason = from_rpc_error(error, address=self._address, what="the content", timeout_s=0.0)
            raise self._make_lost_error(str(reason)) from error

    def _make_lost_error(self, reason: str) -> PeerLostError:
        return PeerLostError(peer=f"the stream of content to {self._address}", reason=reason)


def _end_call(call: Any, outgoing: SimpleQueue[bytes | None], pid: int) -> None:
    if os.getpid() == pid:  # after a fork the call does not exist here
        outgoing.put(None)
        with exclude_forks():
            call.cancel()
