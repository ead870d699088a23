"""Moves a whole layout over a channel: several messages under way, reused staging buffers, one deadline for all."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import closing
from typing import TypeVar

import torch

from tdserve.base.errors import DeadlineExceededError
from tdserve.messages.layout import Message
from tdserve.transport.channel import Channel, PerMessage, Work
from tdserve.transport.copy_ahead import fill_ahead, fill_each
from tdserve.transport.pool import BufferPool
from tdserve.transport.sources_sinks import Sink, Source

MESSAGES_UNDER_WAY = 6
"""Messages under way that are filled in staging buffers of 2 to 4 MiB: while one is on the wire, the next is filled."""

FILLED_UNDER_WAY = 2
"""Messages under way that a separate thread fills. Two are enough, since the thread fills others ahead. With six, each
buffer has left the CPU cache before it is used again: that is 10 % slower for 64 MiB in 2,000 leaves (measured), and
25 % if other machines share the cache."""

RECEIVES_UNDER_WAY = 4
"""Receives under way that go through staging buffers: while one arrives, those before it are copied (6 % faster than
six, likewise)."""

MAX_POSTED = 256
"""Messages under way that need no staging. Posting all at once is a fifth faster than six at a time (256 MiB in 100,
measured): gloo then continues without waiting for a Python thread."""

MESSAGES_AT_ONCE = 3
"""Sent staging buffers that are waited for together if no thread fills others meanwhile: each wait for a large message
costs a thread switch."""

BYTES_AT_ONCE = 4 * 1024 * 1024
"""Bytes of messages received in staging buffers that are waited for together (or one longer message): they are copied
while the next ones arrive."""

_Item = TypeVar("_Item")


class _Clock:
    """The time of one transfer, shared by its waits, or ``PerMessage``."""

    def __init__(self, channel: Channel, timeout_s: float) -> None:
        self._channel = channel
        self._timeout_s = timeout_s
        self._end = time.monotonic() + timeout_s

    def wait(self, works: Sequence[Work]) -> None:
        """Waits for works for the time that is left, even 0; the channel is closed if that is not enough."""
        is_each = isinstance(self._timeout_s, PerMessage)
        remaining_s = self._timeout_s if is_each else max(self._end - time.monotonic(), 0.0)
        try:
            self._channel.wait_all(works, remaining_s)
        except DeadlineExceededError as error:
            raise DeadlineExceededError(what="a transfer", timeout_s=self._timeout_s) from error


def start_send(channel: Channel, tag: int, messages: Sequence[Message], source: Source, pool: BufferPool) -> list[Work]:
    """Posts every message at once and returns; for content that is small, or that lies in place."""
    works = []
    for message in messages:
        buffer = source.find_memory(message)
        if buffer is None:
            buffer = pool.take(message.nbytes)
            source.fill(message, buffer)
        works.append(channel.send(buffer, tag))
    return works


def send_messages(
    channel: Channel,
    tag: int,
    messages: Sequence[Message],
    source: Source,
    *,
    pool: BufferPool,
    timeout_s: float,
    fills_last_after_sends: bool = True,
) -> None:
    """Sends every message of a layout, in order.

    Args:
        fills_last_after_sends: Whether the last message is filled after all memory that is sent in place has left: its
            statement that rows did not move then holds for the bytes that were sent.

    Raises:
        DeadlineExceededError, PeerLostError: The channel is closed; it is unknown what the peer has received.
    """
    clock = _Clock(channel, timeout_s)
    under_way: deque[tuple[Work, bool]] = deque()
    num_staged = num_direct = 0

    def finish_oldest(count: int) -> int:
        oldest = _take(under_way, count)
        clock.wait([work for work, _ in oldest])
        return sum(is_staged for _, is_staged in oldest)

    if fills_last_after_sends:
        made, max_staged, num_at_once = fill_each(messages, source, pool), MESSAGES_UNDER_WAY, MESSAGES_AT_ONCE
    else:
        made, max_staged, num_at_once = fill_ahead(messages, source, pool), FILLED_UNDER_WAY, 1
    with closing(made):
        for number in range(1, len(messages) + 1):
            if fills_last_after_sends and under_way and num_direct and number == len(messages):
                num_staged -= finish_oldest(len(under_way))
            while num_staged >= max_staged:
                num_staged -= finish_oldest(num_at_once)
            if len(under_way) >= MAX_POSTED:
                num_staged -= finish_oldest(MAX_POSTED // 2)
            buffer, is_staged = next(made)
            num_staged += is_staged
            num_direct += not is_staged
            under_way.append((channel.send(buffer, tag), is_staged))
    finish_oldest(len(under_way))


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
    num_staged = 0

    def finish_oldest() -> int:
        oldest = _take(under_way, _count_finished(under_way, is_followed=on_arrived is not None))
        clock.wait([work for work, _, _ in oldest])
        for _, message, staging in oldest:
            if staging is not None:
                sink.drain(message, staging)
        if on_arrived is not None:
            on_arrived(len(oldest))
        return sum(staging is not None for _, _, staging in oldest)

    for message in messages:
        while num_staged >= RECEIVES_UNDER_WAY or len(under_way) >= MAX_POSTED:
            num_staged -= finish_oldest()
        place = sink.find_memory(message)
        if place is None:
            num_staged += 1
            staging = pool.take(message.nbytes)
            under_way.append((channel.recv(staging, tag), message, staging))
        else:
            under_way.append((channel.recv(place, tag), message, None))
    while under_way:
        finish_oldest()


def _count_finished(under_way: Sequence[tuple[Work, Message, torch.Tensor | None]], *, is_followed: bool) -> int:
    """Returns how many of the oldest messages to wait for together; few if a caller forwards what has arrived."""
    limit = MESSAGES_AT_ONCE if is_followed else MAX_POSTED // 2
    nbytes = 0
    for number, (_, message, staging) in enumerate(under_way):
        nbytes += 0 if staging is None else message.nbytes
        if number == limit or nbytes > BYTES_AT_ONCE:
            return max(number, 1)
    return len(under_way)


def _take(under_way: deque[_Item], count: int) -> list[_Item]:
    return [under_way.popleft() for _ in range(min(count, len(under_way)))]


def pack(messages: Sequence[Message], source: Source) -> bytes:
    """Returns the messages concatenated, for content that travels inside a control message."""
    buffer = torch.empty(sum(message.nbytes for message in messages), dtype=torch.uint8, device="cpu")
    at = 0
    for message in messages:
        source.fill(message, buffer[at : at + message.nbytes])
        at += message.nbytes
    return buffer.numpy().tobytes()


def unpack(content: bytes | bytearray | memoryview, messages: Sequence[Message], sink: Sink) -> None:
    """Unpacks what ``pack`` makes; the caller has checked the length."""
    if not messages:
        return
    drain_joined(torch.frombuffer(bytearray(content), dtype=torch.uint8), messages, sink)


def drain_joined(content: torch.Tensor, messages: Sequence[Message], sink: Sink) -> None:
    """Has a sink take messages that lie one behind the other."""
    at = 0
    for message in messages:
        sink.drain(message, content[at : at + message.nbytes])
        at += message.nbytes
