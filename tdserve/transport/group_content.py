"""Moves content among the members of an epoch: to one member, from one to others, and along a route in pieces."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import torch

from tdserve.base.deadline import Deadline
from tdserve.messages.layout import Message
from tdserve.transport.group_gloo import GroupChannel, GroupWork
from tdserve.transport.pool import BufferPool
from tdserve.transport.sources_sinks import Sink, Source
from tdserve.transport.stream import MESSAGES_AT_ONCE, MESSAGES_UNDER_WAY

CALL_TAG = 1
"""Tag of collectives; 0 is used by the channel itself."""

PAIR_TAG = 2
"""Tag of calls between two members: at each of them they may fall between different collectives."""


class CallChannel:
    """The channel of a group, as one call uses it.

    Args:
        group: The channel of the epoch.
        tag: ``CALL_TAG`` or ``PAIR_TAG``.
        deadline: Deadline of the call; it is never None.
        pool: Pool of staging buffers.
    """

    def __init__(self, group: GroupChannel, tag: int, deadline: Deadline, pool: BufferPool) -> None:
        self.group = group
        self.rank, self.world_size = group.rank, group.world_size
        self.pool = pool
        self._tag = tag
        self._deadline = deadline

    def post(self, buffer: torch.Tensor, peer: int) -> GroupWork:
        """Starts to send."""
        return self.group.send(buffer, peer, self._tag)

    def expect(self, buffer: torch.Tensor, peer: int) -> GroupWork:
        """Starts to receive."""
        return self.group.recv(buffer, peer, self._tag)

    def wait(self, works: Sequence[GroupWork]) -> None:
        """Waits for works; errors as in ``GroupChannel.wait_all``."""
        if works:
            self.group.wait_all(works, self._deadline.remaining_s or 0.0)


def send_content(channel: CallChannel, messages: Sequence[Message], source: Source, peers: Sequence[int]) -> None:
    """Sends every message to each of some ranks. Raises PeerLostError or DeadlineExceededError; then the channel is
    closed."""
    under_way: deque[GroupWork] = deque()
    for message in messages:
        _make_room(channel, under_way, len(peers))
        buffer = source.find_memory(message)
        if buffer is None:
            buffer = channel.pool.take(message.nbytes)
            source.fill(message, buffer)
        under_way.extend(channel.post(buffer, peer) for peer in peers)
    channel.wait(under_way)


def recv_content(
    channel: CallChannel, messages: Sequence[Message], sink: Sink, peer: int, onward: Sequence[int] = ()
) -> None:
    """Receives every message from a rank, and forwards each to others as soon as it arrives.

    Raises:
        PeerLostError, DeadlineExceededError: The channel is closed; the sink holds some of the messages.
    """
    coming: deque[tuple[GroupWork, Message, torch.Tensor, bool]] = deque()
    going: deque[GroupWork] = deque()

    def take(count: int) -> None:
        oldest = [coming.popleft() for _ in range(min(count, len(coming)))]
        if not onward:
            channel.wait([work for work, *_ in oldest])
        for work, message, buffer, is_direct in oldest:
            if onward:
                channel.wait([work])
                _make_room(channel, going, len(onward))
                going.extend(channel.post(buffer, other) for other in onward)
            if not is_direct:
                sink.drain(message, buffer)

    for message in messages:
        if len(coming) >= MESSAGES_UNDER_WAY:
            take(1 if onward else MESSAGES_AT_ONCE)
        place = sink.find_memory(message)
        buffer = channel.pool.take(message.nbytes) if place is None else place
        coming.append((channel.expect(buffer, peer), message, buffer, place is not None))
    take(len(coming))
    channel.wait(going)


def _make_room(channel: CallChannel, under_way: deque[GroupWork], num_more: int) -> None:
    if len(under_way) + num_more > MESSAGES_UNDER_WAY:
        count = max(len(under_way) + num_more - MESSAGES_UNDER_WAY, min(MESSAGES_AT_ONCE, len(under_way)))
        channel.wait([under_way.popleft() for _ in range(min(count, len(under_way)))])
