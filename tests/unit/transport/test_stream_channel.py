from __future__ import annotations

import socket
import struct
from collections.abc import Iterator
from contextlib import suppress

import pytest
import torch

from tdserve.base.errors import ConnectError, LocalProtocolError, PeerLostError
from tdserve.transport.byte_streams import SocketStream
from tdserve.transport.stream_channel import EAGER_BYTES, MAX_AHEAD, MAX_EAGER_BYTES, StreamChannel

TIMEOUT_S = 20.0

FRAME = struct.Struct("<BIQ")
GREETING = FRAME.pack(0, 0x7464_7365, 0)
ANNOUNCEMENT, MESSAGE = 1, 2


class Peer:
    """The other end of a channel, which sends what it likes."""

    def __init__(self) -> None:
        self.socket, theirs = socket.socketpair()
        self.socket.settimeout(TIMEOUT_S)
        self.socket.sendall(GREETING)
        self.channel = StreamChannel(SocketStream(theirs, peer="it"), transport="test", peer="it", timeout_s=TIMEOUT_S)
        assert self.receive(FRAME.size) == GREETING

    def receive(self, nbytes: int) -> bytes:
        content = bytearray()
        while len(content) < nbytes and (piece := self.socket.recv(nbytes - len(content))):
            content += piece  # a socket with a timeout returns the bytes that have come, also with MSG_WAITALL
        return bytes(content)

    def send(self, kind: int, tag: int, nbytes: int, content: bytes = b"") -> None:
        self.socket.sendall(FRAME.pack(kind, tag, nbytes) + content)

    def is_closed(self) -> bool:
        """Waits until the channel has closed its end."""
        with suppress(ConnectionResetError):  # some of what was sent to it was not read
            while self.socket.recv(1 << 20):
                pass
        return True


@pytest.fixture
def peer() -> Iterator[Peer]:
    made = Peer()
    yield made
    made.channel.close()
    made.socket.close()


def make_buffer(nbytes: int) -> torch.Tensor:
    return torch.zeros(nbytes, dtype=torch.uint8)


def test_send_when_long_then_leaves_once_its_receive_is_announced(peer: Peer) -> None:
    sending = peer.channel.send(make_buffer(EAGER_BYTES + 1), 5)
    peer.channel.send(make_buffer(1), 6)
    assert peer.receive(FRAME.size + 1) == FRAME.pack(MESSAGE, 6, 1) + b"\0"
    peer.send(ANNOUNCEMENT, 5, EAGER_BYTES + 1)
    assert peer.receive(FRAME.size) == FRAME.pack(MESSAGE, 5, EAGER_BYTES + 1)
    assert len(peer.receive(EAGER_BYTES + 1)) == EAGER_BYTES + 1
    sending.wait(TIMEOUT_S)


def test_send_when_many_short_ones_are_unannounced_then_the_rest_follows_announcements(peer: Peer) -> None:
    num_ahead = MAX_EAGER_BYTES // EAGER_BYTES
    works = [peer.channel.send(make_buffer(EAGER_BYTES), 5) for _ in range(num_ahead + 1)]
    for _ in range(num_ahead):
        assert peer.receive(FRAME.size) == FRAME.pack(MESSAGE, 5, EAGER_BYTES)
        peer.receive(EAGER_BYTES)
    peer.channel.recv(make_buffer(7), 9)  # what comes next is not another message
    assert peer.receive(FRAME.size) == FRAME.pack(ANNOUNCEMENT, 9, 7)
    for _ in works:
        peer.send(ANNOUNCEMENT, 5, EAGER_BYTES)
    assert peer.receive(FRAME.size) == FRAME.pack(MESSAGE, 5, EAGER_BYTES)
    peer.receive(EAGER_BYTES)
    for work in works:
        work.wait(TIMEOUT_S)


def test_message_when_long_without_a_receive_then_the_channel_closes(peer: Peer) -> None:
    peer.send(MESSAGE, 5, 1 << 60)
    assert peer.is_closed()
    with pytest.raises(PeerLostError, match=f"{MAX_EAGER_BYTES} bytes at most"):
        peer.channel.recv(make_buffer(1), 5)


def test_messages_when_short_without_receives_then_the_channel_closes_at_its_limit(peer: Peer) -> None:
    for _ in range(MAX_EAGER_BYTES // EAGER_BYTES):
        peer.send(MESSAGE, 5, EAGER_BYTES, bytes(EAGER_BYTES))
    peer.send(MESSAGE, 5, 1)
    assert peer.is_closed()


@pytest.mark.slow
def test_announcements_when_without_sends_then_the_channel_closes_at_their_limit(peer: Peer) -> None:
    peer.socket.sendall(FRAME.pack(ANNOUNCEMENT, 5, 1) * (MAX_AHEAD + 1))
    assert peer.is_closed()


@pytest.mark.parametrize("frame", [FRAME.pack(7, 0, 0), FRAME.pack(0, 1, 0), b"GET / HTTP/1.1\r\n"])
def test_frame_when_it_is_none_then_the_channel_closes(peer: Peer, frame: bytes) -> None:
    peer.socket.sendall(frame)
    assert peer.is_closed()


def test_lengths_when_the_ends_disagree_then_refused_and_closed(peer: Peer) -> None:
    peer.send(MESSAGE, 5, 3, b"abc")
    peer.send(ANNOUNCEMENT, 6, 4)
    waiting = peer.channel.recv(make_buffer(1), 7)
    peer.send(MESSAGE, 7, 1, b"x")
    waiting.wait(TIMEOUT_S)  # the frames before it were read
    with pytest.raises(LocalProtocolError, match="tag 6: 5 bytes are sent, 4 are to be received"):
        peer.channel.send(make_buffer(5), 6)
    assert peer.is_closed()


def test_channel_when_the_other_end_does_not_open_then_connect_error() -> None:
    ours, theirs = socket.socketpair()
    with ours, pytest.raises(ConnectError, match="did not open within"):
        StreamChannel(SocketStream(theirs, peer="it"), transport="test", peer="it", timeout_s=0.05)


def test_channel_when_the_stream_has_ended_then_connect_error() -> None:
    ours, theirs = socket.socketpair()
    ours.close()
    with pytest.raises(ConnectError):
        StreamChannel(SocketStream(theirs, peer="it"), transport="test", peer="it", timeout_s=TIMEOUT_S)
