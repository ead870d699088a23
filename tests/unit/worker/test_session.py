from __future__ import annotations

import pytest
import torch

from tdserve.control.status import decode_failure
from tdserve.errors import LocalProtocolError, PeerLostError, RemoteProtocolError
from tdserve.v1 import worker_pb2
from tests.unit.worker.peer import TIMEOUT_S, Peer


def test_order_when_it_fails_then_reported_and_the_next_is_done(peer: Peer) -> None:
    assert isinstance(peer.error(), RemoteProtocolError)
    error = peer.error(discard=worker_pb2.Discard(message_nbytes=[-1 % 2**64]))
    assert isinstance(error, (LocalProtocolError, PeerLostError))


def test_orders_when_queued_then_performed_in_turn(peer: Peer) -> None:
    peer.open_channel()
    numbers = [peer.put(worker_pb2.Order(discard=worker_pb2.Discard(message_nbytes=[8]))) for _ in range(3)]
    for _ in numbers:
        peer.channel.send(torch.zeros(8, dtype=torch.uint8), 0).wait(TIMEOUT_S)
    assert [peer.next_report().order for _ in numbers] == numbers


def test_channel_when_the_client_goes_then_the_order_fails_and_the_session_is_lost(peer: Peer) -> None:
    peer.open_channel()
    number = peer.put(worker_pb2.Order(discard=worker_pb2.Discard(message_nbytes=[8])))
    peer.channel.close()
    failed, lost = peer.next_report(), peer.next_report()
    assert failed.order == number
    assert isinstance(decode_failure(failed.failure), PeerLostError)
    assert lost.HasField("session_lost")
    assert (lost.order, lost.session) == (0, peer.session.number)


def test_failure_when_the_client_waits_for_bytes_then_its_channel_is_closed_first(peer: Peer) -> None:
    peer.open_channel()
    waiting = peer.channel.recv(torch.zeros(8, dtype=torch.uint8), 3)
    peer.put(worker_pb2.Order(is_accepted=True))  # an order that nobody knows
    assert peer.next_report().HasField("failure")
    with pytest.raises(PeerLostError):
        waiting.wait(TIMEOUT_S)
    assert peer.next_report().HasField("session_lost")


def test_channel_when_the_session_is_closed_then_there_is_none(peer: Peer) -> None:
    peer.open_channel()
    peer.close()
    with pytest.raises(PeerLostError, match="session 7"):
        _ = peer.session.channel


def test_close_when_the_rendezvous_is_under_way_then_it_ends(peer: Peer) -> None:
    peer.put(worker_pb2.Order(open_session=worker_pb2.OpenSession(transport="gloo", host="127.0.0.1")))
    peer.session.close()
    assert peer.next_report().HasField("failure")
