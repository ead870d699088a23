from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict

from tdserve.errors import DeadlineExceededError, RemoteProtocolError
from tdserve.layout import Layout
from tdserve.spec.capture import capture
from tdserve.transport.ends import LeafEnd
from tdserve.transport.stream import pack
from tdserve.v1 import control_pb2, worker_pb2
from tdserve.worker.transfers import MAX_POSTED_BYTES, answer, check_inline, take
from tests.unit.worker.peer import TIMEOUT_S, Peer, receive

LEAF = torch.arange(10.0)
LAYOUT = Layout.of(capture(TensorDict({"a": LEAF}, [10])).spec)
ORDER = worker_pb2.Order(tag=6)


def test_answer_when_inline_then_in_the_report(peer: Peer) -> None:
    worked = answer(peer.session, ORDER, LAYOUT, LeafEnd([LEAF]), values=b"v", inline=True)
    assert (worked.inline, worked.values, worked.nbytes_moved) == (LEAF.numpy().tobytes(), b"v", 0)


def test_answer_when_not_inline_then_over_the_channel_under_its_tag(peer: Peer) -> None:
    peer.open_channel()
    received = torch.zeros(40, dtype=torch.uint8)
    receiving = peer.channel.recv(received, 6)
    worked = answer(peer.session, ORDER, LAYOUT, LeafEnd([LEAF]), values=b"", inline=False)
    receiving.wait(TIMEOUT_S)
    assert worked.nbytes_moved == 40
    assert torch.equal(received.view(torch.float32), LEAF)


def test_answer_when_small_then_does_not_wait_for_the_client(peer: Peer) -> None:
    peer.open_channel()
    for tag in (6, 7):
        answer(peer.session, worker_pb2.Order(tag=tag), LAYOUT, LeafEnd([LEAF]), values=b"", inline=False)
    for tag in (7, 6):
        (received,) = receive(peer, LAYOUT.message_nbytes, tag)
        assert torch.equal(received.view(torch.float32), LEAF)


def test_answer_when_large_then_waits_for_the_client() -> None:
    peer = Peer(transfer_timeout_s=0.05)
    peer.open_channel()
    leaf = torch.zeros(MAX_POSTED_BYTES // 4 + 1)
    layout = Layout.of(capture(TensorDict({"a": leaf}, [])).spec)
    with pytest.raises(DeadlineExceededError):
        answer(peer.session, ORDER, layout, LeafEnd([leaf]), values=b"", inline=False)
    peer.close()


def test_take_when_inline_then_from_the_message(peer: Peer) -> None:
    target = torch.zeros(10)
    content = control_pb2.Content(inline=pack(LAYOUT.messages, LeafEnd([LEAF])))
    take(peer.session, ORDER, content, LAYOUT, LeafEnd([target]))
    assert torch.equal(target, LEAF)


@pytest.mark.parametrize(
    "content",
    [
        control_pb2.Content(inline=bytes(39)),
        control_pb2.Content(message_nbytes=[41]),
        control_pb2.Content(message_nbytes=[20, 20]),
        control_pb2.Content(),
    ],
)
def test_take_when_the_sizes_are_not_the_layouts_then_refused_before_a_byte(
    peer: Peer, content: control_pb2.Content
) -> None:
    # gloo would end this process if more came than it was told to expect.
    target = torch.zeros(10)
    with pytest.raises(RemoteProtocolError, match="40 bytes"):
        take(peer.session, ORDER, content, LAYOUT, LeafEnd([target]))
    assert not target.any()


def test_check_inline_when_of_the_right_length_then_silent() -> None:
    check_inline(control_pb2.Content(inline=bytes(40)), LAYOUT)
