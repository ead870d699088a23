"""Moving a whole layout over a channel: several messages under way, staging buffers reused, one deadline for all."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

from tdserve.errors import DeadlineExceededError
from tdserve.layout import Message
from tdserve.transport.channel import Channel, Work
from tdserve.transport.ends import Sink, Source
from tdserve.transport.pool import BufferPool

MESSAGES_UNDER_WAY = 6
"""While one message is on the wire, the next is being copied together and others are posted. One is clearly slower,
from three to eight messages of 1 to 3 MiB still gain (measured); each may hold a staging buffer of 4 MiB."""


MESSAGES_AT_ONCE = 3
"""Of these so many are waited for together: every wait for a large message costs a change of threads. 256 MiB in 100
leaves are received a sixth faster by it (measured)."""

_Item = TypeVar("_Item")


class PerMessage(float):
    """A timeout in seconds that every message has for itself: what moves, however slowly, is not given up."""


class _Clock:
    """One transfer's time, spent on one wait after the other, or ``PerMessage``."""

    def __init__(self, channel: Channel, timeout_s: float) -> None:
        self._channel = channel
        self._timeout_s = timeout_s
        self._end = time.monotonic() + timeout_s

    def wait(self, works: Sequence[Work]) -> None:
        """Waits for works with what is left, even 0; the channel is closed when that is not enough."""
        try:
            remaining_s = max(self._end - time.monotonic(), 0.0)
            if isinstance(self._timeout_s, PerMessage):  # the clock began anew with the wait before
                remaining_s += self._timeout_s * (len(works) - 1)
            self._channel.wait_all(works, remaining_s)
        except DeadlineExceededError as error:
            raise DeadlineExceededError(what="a transfer", timeout_s=self._timeout_s) from error
        if isinstance(self._timeout_s, PerMessage):
            self._end = time.monotonic() + self._timeout_s


def start_send(channel: Channel, tag: int, messages: Sequence[Message], source: Source, pool: BufferPool) -> list[Work]:
    """Posts every message at once and returns; for content that is small, or that lies in place anyway."""
    works = []
    for message in messages:
        buffer = source.direct(message)
        if buffer is None:
            buffer = pool.take(message.nbytes)
            source.fill(message, buffer)
        works.append(channel.send(buffer, tag))
    return works


def send_messages(
    channel: Channel, tag: int, messages: Sequence[Message], source: Source, *, pool: BufferPool, timeout_s: float
) -> None:
    """Sends every message of a layout, in order.

    The last message is made after all memory that was sent in place has left: what it says of the others (that their
    rows did not move) is then true of the bytes that were sent.

    Raises:
        DeadlineExceededError, PeerLostError: The channel is closed; what the peer has got is unknown.
    """
    clock = _Clock(channel, timeout_s)
    under_way: deque[Work] = deque()
    num_direct = 0
    for number, message in enumerate(messages, 1):
        if under_way and num_direct and number == len(messages):
            clock.wait(_take(under_way, len(under_way)))
        elif len(under_way) >= MESSAGES_UNDER_WAY:
            clock.wait(_take(under_way, MESSAGES_AT_ONCE))
        buffer = source.direct(message)
        if buffer is None:
            buffer = pool.take(message.nbytes)
            source.fill(message, buffer)
        else:
            num_direct += 1
        under_way.append(channel.send(buffer, tag))
    clock.wait(under_way)


def recv_messages(
    channel: Channel,
    tag: int,
    messages: Sequence[Message],
    sink: Sink,
    *,
    pool: BufferPool,
    timeout_s: float,
    on_arrived: Callable[[int], None] | None = None,
) -> None:
    """Receives every message of a layout, in order, into the sink.

    Args:
        on_arrived: Called with the number of messages that the sink has taken since the last call.

    Raises:
        DeadlineExceededError, PeerLostError: The channel is closed; the sink holds some of the messages.
    """
    clock = _Clock(channel, timeout_s)
    under_way: deque[tuple[Work, Message, torch.Tensor | None]] = deque()

    def finish_oldest() -> None:
        oldest = _take(under_way, MESSAGES_AT_ONCE)
        clock.wait([work for work, _, _ in oldest])
        for _, message, staging in oldest:
            if staging is not None:
                sink.drain(message, staging)
        if on_arrived is not None:
            on_arrived(len(oldest))

    for message in messages:
        if len(under_way) >= MESSAGES_UNDER_WAY:
            finish_oldest()
        place = sink.direct(message)
        if place is None:
            staging = pool.take(message.nbytes)
            under_way.append((channel.recv(staging, tag), message, staging))
        else:
            under_way.append((channel.recv(place, tag), message, None))
    while under_way:
        finish_oldest()


def _take(under_way: deque[_Item], count: int) -> list[_Item]:
    return [under_way.popleft() for _ in range(min(count, len(under_way)))]


def pack(messages: Sequence[Message], source: Source) -> bytes:
    """The messages one after the other, for content that rides inside a control message."""
    buffer = torch.empty(sum(message.nbytes for message in messages), dtype=torch.uint8)
    at = 0
    for message in messages:
        source.fill(message, buffer[at : at + message.nbytes])
        at += message.nbytes
    return buffer.numpy().tobytes()


def unpack(content: bytes | bytearray | memoryview, messages: Sequence[Message], sink: Sink) -> None:
    """The reverse of ``pack``; the caller has checked the length."""
    if not messages:
        return
    buffer = torch.frombuffer(bytearray(content), dtype=torch.uint8)
    at = 0
    for message in messages:
        sink.drain(message, buffer[at : at + message.nbytes])
        at += message.nbytes
