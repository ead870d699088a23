"""How much a session may leave in memory: rendezvous entries, and messages that its client does not take."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from tdserve.v1 import control_pb2

MAX_ENTRIES = 200
"""Most rendezvous entries of one channel; two groups take about ten."""

MAX_ENTRY_BYTES = 1 << 13
"""Largest key and largest value of an entry; they take some hundreds of bytes."""

MAX_UNSENT_BYTES = 16 << 20
"""Most bytes of messages that a client did not ask for and does not take."""

MAX_REFUSING = 8_000
"""Most refusals on their way to one client."""

MAX_REASON = 500
"""Most characters of a client's reason, for one port or for giving a group up, that are kept and sent on."""

MESSAGE_BYTES = 1024
"""Memory of a small message that waits to be sent, with its task."""


def is_short(entry: control_pb2.Rendezvous) -> bool:
    """Returns whether a rendezvous entry is one that is kept, or passed on to another client."""
    return len(entry.key) <= MAX_ENTRY_BYTES and len(entry.value) <= MAX_ENTRY_BYTES


@dataclass
class HeldAnswers:
    """The answers to a session's reads.

    Attributes:
        held_nbytes: Their memory.
    """

    held_nbytes: int = 0


class UnsentMessages:
    """The messages of a session that its client did not ask for, until they are sent."""

    def __init__(self) -> None:
        self._nbytes = 0

    def has_room(self, message: control_pb2.ServerMessage) -> bool:
        """Returns whether one more message may wait."""
        return self._nbytes + message.ByteSize() + MESSAGE_BYTES <= MAX_UNSENT_BYTES

    def send(
        self, send: Callable[[control_pb2.ServerMessage], Awaitable[None]], message: control_pb2.ServerMessage
    ) -> Coroutine[Any, Any, None]:
        """Counts a message from now on until it is sent; returns what sends it."""
        nbytes = message.ByteSize() + MESSAGE_BYTES
        self._nbytes += nbytes
        return self._send(send, message, nbytes)

    async def _send(
        self,
        send: Callable[[control_pb2.ServerMessage], Awaitable[None]],
        message: control_pb2.ServerMessage,
        nbytes: int,
    ) -> None:
        try:
            await send(message)
        finally:
            self._nbytes -= nbytes


class UnsentRefusals:
    """The refusals of a session's requests that had not begun, until they are sent. Admission control does not count
    such requests.

    Args:
        ended: Set if there are too many: the client reads no answers.
    """

    def __init__(self, ended: asyncio.Event) -> None:
        self._ended = ended
        self._num_unsent = 0
        self._has_sent = asyncio.Event()

    @contextmanager
    def count(self) -> Iterator[None]:
        """Counts a block that sends one. More than ``MAX_REFUSING`` end the session."""
        self._num_unsent += 1
        if self._num_unsent > MAX_REFUSING:
            self._ended.set()
        try:
            yield
        finally:
            self._num_unsent -= 1
            self._has_sent.set()

    async def wait_for_room(self) -> None:
        """Waits while more than half of ``MAX_REFUSING`` are unsent."""
        while self._num_unsent > MAX_REFUSING // 2 and not self._ended.is_set():
            self._has_sent.clear()
            await self._has_sent.wait()
