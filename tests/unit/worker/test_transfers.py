from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tensordict import TensorDict

from tdserve.base.errors import DeadlineExceededError, RemoteProtocolError
from tdserve.messages.content import MIN_SENT_VALUES_BYTES, check_inline
from tdserve.messages.layout import MAX_MESSAGE_BYTES, Layout
from tdserve.store.exchange.spools import read_spooled
from tdserve.structure.captures.capture import capture
from tdserve.structure.tensors.torch_types import view_bytes
from tdserve.transport.sources_sinks import LeafBuffers
from tdserve.transport.stream import pack
from tdserve.v1 import control_pb2, worker_pb2
from tdserve.worker.transfers import MAX_UNAWAITED_BYTES, receive_write, send_read, spool_values
from tests.unit.worker.peer import TIMEOUT_S, Peer, receive

LEAF = torch.arange(10.0)
LAYOUT = Layout.from_spec(capture(TensorDict({"a": LEAF}, [10])).spec)
ORDER = worker_pb2.Order(tag=6, is_accepted=True)


def test_answer_when_inline_then_in_the_report(peer: Peer) -> None:
    worked = send_read(peer.session.lane, ORDER, LAYOUT, LeafBuffers([LEAF]), values=b"v", inline=True)
    assert (worked.inline, worked.values, worked.nbytes_moved) == (LEAF.numpy().tobytes(), b"v", 0)


def test_answer_when_not_inline_then_over_the_channel_under_its_tag(peer: Peer) -> None:
    peer.open_channel()
    received = torch.zeros(40, dtype=torch.uint8)
    receiving = peer.channel.recv(received, 6)
    worked = send_read(peer.session.lane, ORDER, LAYOUT, LeafBuffers([LEAF]), values=b"", inline=False)
    receiving.wait(TIMEOUT_S)
    assert worked.nbytes_moved == 40
    assert torch.equal(received.view(torch.float32), LEAF)


def test_answer_when_small_then_does_not_wait_for_the_client(peer: Peer) -> None:
    peer.open_channel()
    for tag in (6, 7):
        send_read(
            peer.session.lane,
            worker_pb2.Order(tag=tag, is_accepted=True),
            LAYOUT,
            LeafBuffers([LEAF]),
            values=b"",
            inline=False,
        )
    for tag in (7, 6):
        (received,) = receive(peer, LAYOUT.message_nbytes, tag)
        assert torch.equal(received.view(torch.float32), LEAF)


def test_answer_when_large_then_waits_for_the_client() -> None:
    peer = Peer(transfer_timeout_s=0.05)
    peer.open_channel()
    leaf = torch.zeros(MAX_UNAWAITED_BYTES // 4 + 1)
    layout = Layout.from_spec(capture(TensorDict({"a": leaf}, [])).spec)
    with pytest.raises(DeadlineExceededError):
        send_read(peer.session.lane, ORDER, layout, LeafBuffers([leaf]), values=b"", inline=False)
    peer.close()


def test_take_when_inline_then_from_the_message(peer: Peer) -> None:
    target = torch.zeros(10)
    content = control_pb2.Content(inline=pack(LAYOUT.messages, LeafBuffers([LEAF])))
    receive_write(peer.session.lane, ORDER, content, LAYOUT, LeafBuffers([target]))
    assert torch.equal(target, LEAF)


@pytest.mark.parametrize(
    "content",
    [
        control_pb2.Content(inline=bytes(39)),
        control_pb2.Content(message_nbytes=[41]),
        control_pb2.Content(message_nbytes=[20, 20]),
        control_pb2.Content(),
        control_pb2.Content(message_nbytes=[40], values_nbytes=5),
        control_pb2.Content(message_nbytes=[40, 5], values_nbytes=6),
        control_pb2.Content(message_nbytes=[40, 5]),
        control_pb2.Content(message_nbytes=[40, 1 << 62], values_nbytes=1 << 62),
    ],
)
def test_take_when_the_sizes_are_not_the_layouts_then_refused_before_a_byte(
    peer: Peer, content: control_pb2.Content
) -> None:
    # gloo would end this process if more came than it was told to expect.
    target = torch.zeros(10)
    with pytest.raises(RemoteProtocolError, match="bytes"):
        receive_write(peer.session.lane, ORDER, content, LAYOUT, LeafBuffers([target]))
    assert not target.any()


def test_check_inline_when_of_the_right_length_then_silent() -> None:
    check_inline(control_pb2.Content(inline=bytes(40)), LAYOUT)


def test_check_inline_when_values_are_said_to_follow_then_refused() -> None:
    with pytest.raises(RemoteProtocolError, match="behind"):
        check_inline(control_pb2.Content(inline=bytes(40), values_nbytes=70_000), LAYOUT)


MANY = bytes(range(256)) * (MIN_SENT_VALUES_BYTES // 256)


@pytest.mark.parametrize("inline", [True, False])
def test_answer_when_values_are_many_then_announced_and_behind_the_leaves(peer: Peer, inline: bool) -> None:
    peer.open_channel()
    order = worker_pb2.Order(order=3, tag=6)
    worked = send_read(
        peer.session.lane, order, LAYOUT, LeafBuffers([LEAF]), values=MANY, inline=inline, sends_values=True
    )
    prepared = peer.next_report().prepared
    assert (prepared.values, prepared.values_nbytes) == (b"", len(MANY))
    leaf, values = receive(peer, (40, len(MANY)), 6)
    assert torch.equal(leaf.view(torch.float32), LEAF)
    assert values.numpy().tobytes() == MANY
    assert (worked.nbytes_moved, worked.values, worked.HasField("inline")) == (40 + len(MANY), b"", False)
    assert order.is_accepted  # the client waits: a failure must close the channel


@pytest.mark.parametrize(("values", "sends_values"), [(MANY, False), (MANY[:-1], True)])
def test_answer_when_values_are_few_or_the_client_takes_none_then_in_the_report(
    peer: Peer, values: bytes, sends_values: bool
) -> None:
    worked = send_read(
        peer.session.lane, ORDER, LAYOUT, LeafBuffers([LEAF]), values=values, inline=True, sends_values=sends_values
    )
    assert (worked.values, worked.nbytes_moved) == (values, 0)
    assert worked.HasField("inline")


def test_take_when_values_follow_then_in_the_spool_and_the_leaves_in_their_places(peer: Peer, tmp_path: Path) -> None:
    peer.open_channel()
    spool, target = str(tmp_path / "staging" / "0.values"), torch.zeros(10)
    nbytes = MAX_MESSAGE_BYTES + 7
    values = torch.randint(0, 256, (nbytes,), dtype=torch.uint8)
    sizes = (40, MAX_MESSAGE_BYTES, 7)
    content = control_pb2.Content(message_nbytes=sizes, values_nbytes=nbytes)
    sent = torch.split(torch.cat([view_bytes(LEAF), values]), list(sizes))
    works = [peer.channel.send(buffer, 6) for buffer in sent]
    with spool_values(content, spool) as end:
        worked = receive_write(peer.session.lane, ORDER, content, LAYOUT, LeafBuffers([target]), values=end)
    peer.channel.wait_all(works, TIMEOUT_S)
    assert torch.equal(target, LEAF)
    assert read_spooled(spool, 0, nbytes) == values.numpy().tobytes()
    assert worked.nbytes_moved == sum(sizes)


def test_take_when_values_follow_and_nothing_takes_them_then_refused_before_a_byte(peer: Peer) -> None:
    content = control_pb2.Content(message_nbytes=[40, 70_000], values_nbytes=70_000)
    with spool_values(control_pb2.Content(), "") as nothing, pytest.raises(RemoteProtocolError, match="70000"):
        receive_write(peer.session.lane, ORDER, content, LAYOUT, LeafBuffers([torch.zeros(10)]), values=nothing)
