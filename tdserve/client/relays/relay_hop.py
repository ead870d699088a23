"""A hop between two clients: a gloo pair that carries one version from a client that keeps it to one that pulls it.

Every hop opens a new pair by a rendezvous through the session: two clients that know only what the server tells them
have nothing to agree on, and nothing to repair.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from threading import Lock

import torch

from tdserve.base.errors import PeerLostError, TDServeError
from tdserve.client.relays.kept_version import KeptVersion
from tdserve.messages.layout import Layout
from tdserve.transport.channel import Channel, Work
from tdserve.transport.channel_forming import Forming
from tdserve.transport.gloo import GlooChannel
from tdserve.transport.proving import make_hop_credential
from tdserve.transport.rendezvous import KVStore
from tdserve.transport.sources_sinks import FlatBuffer
from tdserve.transport.stream import MESSAGES_AT_ONCE, MESSAGES_UNDER_WAY

RELAY_RANK = 0
PULLER_RANK = 1

CONTENT_TAG = 1
THANKS_TAG = 2

CONNECT_S = 3.0
"""Time for opening the pair, which takes five milliseconds if both clients run and can reach each other."""

STALL_S = 2.0
"""The other end counts as stopped, or as too slow to be useful (6 MB/s), if a few messages take longer."""


class RelayHop:
    """One end of a hop. Threads: any may call ``feed`` and ``cancel``.

    Args:
        number: Number of the hop.
        rank: ``RELAY_RANK`` or ``PULLER_RANK``.
        secret: Both ends prove that they have it.
        publish: Sends an entry of the rendezvous: number, key, value.
        make_host: Returns the address of the interface to connect from; may fail.
    """

    def __init__(
        self,
        number: int,
        rank: int,
        *,
        secret: bytes,
        publish: Callable[[int, str, bytes], None],
        make_host: Callable[[], str],
    ) -> None:
        self._secret = secret
        self.number = number
        self.peer = f"the other end of hop {number}"
        self._rank = rank
        self._make_host = make_host
        self._lock = Lock()
        self._error: TDServeError | None = None
        self._channel: Channel | None = None
        self._kv_store = KVStore(lambda key, value: publish(number, key, value))
        self._forming: Forming | None = None

    def feed(self, key: str, value: bytes) -> None:
        """Receives an entry that the other end has set."""
        self._kv_store.feed(key, value)

    def connect(self) -> Channel:
        """Opens the pair.

        Raises:
            ConnectError: It was not open in time.
            TDServeError: The error given to ``cancel``.
        """
        with self._lock:
            if self._error is not None:
                raise self._error
            self._forming = Forming(self._make, peer=self.peer, name=f"tdserve-open-hop-{self.number}")
        channel = self._forming.wait(CONNECT_S)
        with self._lock:
            self._channel = channel
            error = self._error
        if error is not None:
            channel.close()
            raise error
        return channel

    def cancel(self, error: TDServeError) -> None:
        """Ends the hop; a thread that uses it gets this error, or that of a lost channel. Idempotent."""
        with self._lock:
            self._error = self._error or error
            forming, channel = self._forming, self._channel
        self._kv_store.close()
        if channel is not None:
            channel.close()
        elif forming is not None:
            forming.cancel(error)

    def close(self) -> None:
        """Ends the hop. Idempotent."""
        self.cancel(PeerLostError(peer=self.peer, reason="the hop is closed"))

    def _make(self) -> GlooChannel:
        credential, host = make_hop_credential(self._secret, self.number), self._make_host()
        return GlooChannel(
            self._kv_store, self._rank, host=host, credential=credential, peer=self.peer, timeout_s=CONNECT_S
        )


def pass_on(channel: Channel, kept: KeptVersion) -> None:
    """Sends a version, message by message as they arrive, and waits until the other end acknowledges it.

    Raises:
        PeerLostError, DeadlineExceededError: The other end, or the source of the messages, is gone, stopped or too
            slow.
    """
    thanks = torch.zeros(1, dtype=torch.uint8)
    thanked = channel.recv(thanks, THANKS_TAG)
    flat = FlatBuffer(kept.buffer)
    under_way: deque[Work] = deque()
    for number, message in enumerate(kept.layout.messages):
        kept.wait(number, STALL_S)
        if len(under_way) >= MESSAGES_UNDER_WAY:
            channel.wait_all([under_way.popleft()], STALL_S)
        under_way.append(channel.send(flat.find_memory(message), CONTENT_TAG))
    while under_way:
        channel.wait_all([under_way.popleft()], STALL_S)
    channel.wait_all([thanked], STALL_S)


def receive(channel: Channel, layout: Layout, buffer: torch.Tensor, *, on_arrived: Callable[[int], None]) -> None:
    """Receives a version into a flat buffer, and acknowledges it.

    Args:
        on_arrived: Called with the number of messages that have arrived since the last call; may raise.

    Raises:
        PeerLostError, DeadlineExceededError: The other end is gone, stopped or too slow; a part has arrived.
    """
    flat = FlatBuffer(buffer)
    under_way: deque[Work] = deque()

    def finish_oldest() -> None:
        oldest = [under_way.popleft() for _ in range(min(MESSAGES_AT_ONCE, len(under_way)))]
        channel.wait_all(oldest, STALL_S)
        on_arrived(len(oldest))

    for message in layout.messages:
        if len(under_way) >= MESSAGES_UNDER_WAY:
            finish_oldest()
        under_way.append(channel.recv(flat.find_memory(message), CONTENT_TAG))
    while under_way:
        finish_oldest()
    channel.wait_all([channel.send(torch.ones(1, dtype=torch.uint8), THANKS_TAG)], STALL_S)
