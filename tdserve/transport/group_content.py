"""Moves content among the members of an epoch: to one member, from one to others, and along a route in pieces."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import torch

from tdserve.base.deadline import Deadline
from tdserve.messages.layout import Message
from tdserve.transport.group_gloo import GroupLink, LinkWork
from tdserve.transport.pool import BufferPool
from tdserve.transport.sources_sinks import Sink, Source
from tdserve.transport.stream import MESSAGES_AT_ONCE, MESSAGES_UNDER_WAY

CALL_TAG = 1
"""Tag of collectives; 0 is used by the link itself."""

PAIR_TAG = 2
"""Tag of calls between two members: at each of them they may fall between different collectives."""


class GroupWire:
    """One call's use of a link.

    Args:
        link: The link of the epoch.
        tag: ``CALL_TAG`` or ``PAIR_TAG``.
        deadline: Deadline of the call; it is never None.
        pool: Pool of staging buffers.
    """

    def __init__(self, link: GroupLink, tag: int, deadline: Deadline, pool: BufferPool) -> None:
        self.link = link
        self.pool = pool
        self._tag = tag
        self._deadline = deadline

    def post(self, buffer: torch.Tensor, peer: int) -> LinkWork:
        """Starts to send."""
        return self.link.send(buffer, peer, self._tag)

    def expect(self, buffer: torch.Tensor, peer: int) -> LinkWork:
        """Starts to receive."""
        return self.link.recv(buffer, peer, self._tag)

    def wait(self, works: Sequence[LinkWork]) -> None:
        """Waits for works; errors as in ``GroupLink.wait_all``."""
        if works:
            self.link.wait_all(works, self._deadline.remaining_s or 0.0)


def send_content(wire: GroupWire, messages: Sequence[Message], source: Source, peers: Sequence[int]) -> None:
    """Sends every message to each of some ranks. Raises PeerLostError or DeadlineExceededError; then the link is
    closed."""
    under_way: deque[LinkWork] = deque()
    for message in messages:
        _make_room(wire, under_way, len(peers))
        buffer = source.find_memory(message)
        if buffer is None:
            buffer = wire.pool.take(message.nbytes)
            source.fill(message, buffer)
        under_way.extend(wire.post(buffer, peer) for peer in peers)
    wire.wait(under_way)


def recv_content(
    wire: GroupWire, messages: Sequence[Message], sink: Sink, peer: int, onward: Sequence[int] = ()
) -> None:
    """Receives every message from a rank, and forwards each to others as soon as it arrives.

    Raises:
        PeerLostError, DeadlineExceededError: The link is closed; the sink holds some of the messages.
    """
    coming: deque[tuple[LinkWork, Message, torch.Tensor, bool]] = deque()
    going: deque[LinkWork] = deque()

    def take(count: int) -> None:
        oldest = [coming.popleft() for _ in range(min(count, len(coming)))]
        if not onward:
            wire.wait([work for work, *_ in oldest])
        for work, message, buffer, is_direct in oldest:
            if onward:
                wire.wait([work])
                _make_room(wire, going, len(onward))
                going.extend(wire.post(buffer, other) for other in onward)
            if not is_direct:
                sink.drain(message, buffer)

    for message in messages:
        if len(coming) >= MESSAGES_UNDER_WAY:
            take(1 if onward else MESSAGES_AT_ONCE)
        place = sink.find_memory(message)
        buffer = wire.pool.take(message.nbytes) if place is None else place
        coming.append((wire.expect(buffer, peer), message, buffer, place is not None))
    take(len(coming))
    wire.wait(going)


def _make_room(wire: GroupWire, under_way: deque[LinkWork], num_more: int) -> None:
    if len(under_way) + num_more > MESSAGES_UNDER_WAY:
        count = max(len(under_way) + num_more - MESSAGES_UNDER_WAY, min(MESSAGES_AT_ONCE, len(under_way)))
        wire.wait([under_way.popleft() for _ in range(min(count, len(under_way)))])
