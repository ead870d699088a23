from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from queue import Empty
from threading import Event
from typing import Any

import pytest
import torch

from tdserve.base.errors import (
    ConnectError,
    PeerLostError,
    RemoteProtocolError,
    TransferAbortedError,
)
from tdserve.control.status import decode_failure
from tdserve.messages.content import make_rows_layout
from tdserve.transport import gloo
from tdserve.transport.message_channel import MAX_SENT
from tdserve.transport.proven import close_pairs
from tdserve.v1 import worker_pb2
from tdserve.worker.lane import Lane
from tests.gloo_secret import SECRET
from tests.processes import wait_for
from tests.unit.worker.peer import TIMEOUT_S, Peer, StoredTensorDict, receive, sampling


def test_order_when_it_fails_then_reported_and_the_next_is_done(peer: Peer) -> None:
    assert isinstance(peer.error(), RemoteProtocolError)


@pytest.mark.parametrize("nbytes", [2**31, 2**64 - 1])
@pytest.mark.parametrize("kind", ["discard", "send_void"])
def test_order_when_a_size_was_announced_that_no_message_has_then_nothing_is_allocated_and_the_channel_closes(
    peer: Peer, kind: str, nbytes: int
) -> None:
    order = worker_pb2.Order()
    getattr(order, kind).message_nbytes.append(nbytes)
    peer.put(order)
    assert peer.next_report().HasField("channel_lost")
    assert isinstance(decode_failure(peer.next_report().failure), RemoteProtocolError)


def test_orders_when_queued_then_performed_in_turn(peer: Peer) -> None:
    peer.open_channel()
    numbers = [peer.put(worker_pb2.Order(discard=worker_pb2.Discard(message_nbytes=[8]))) for _ in range(3)]
    for _ in numbers:
        peer.channel.send(torch.zeros(8, dtype=torch.uint8), 0).wait(TIMEOUT_S)
    assert [peer.next_report().order for _ in numbers] == numbers


@pytest.fixture
def quick(peer: Peer, plain: StoredTensorDict) -> Peer:
    """A lane with an open channel, and a store of which few rows are sent at once."""
    peer.open_channel()
    peer.put(sampling(plain, [0]))
    receive(peer, make_rows_layout(plain.spec, 1).message_nbytes, 0)
    assert peer.next_report().HasField("done")  # it is mapped
    wait_for(lambda: not peer.session.is_busy, "the end of that order")
    return peer


def test_quick_order_when_nothing_is_queued_then_done_before_put_returns(quick: Peer, plain: StoredTensorDict) -> None:
    sizes = make_rows_layout(plain.spec, 2).message_nbytes
    for tag in (1, 2, 3):
        number = quick.put(sampling(plain, [4, 1], tag=tag))
        report = quick.reports.get_nowait()
        assert (report.order, report.done.nbytes_moved) == (number, sum(sizes))
    for tag in (3, 2, 1):  # nobody waits for the client
        (content,) = receive(quick, sizes, tag)
        assert content[:16].view(torch.int64).tolist() == [4, 1]


def test_quick_order_when_another_is_queued_then_in_turn(quick: Peer, plain: StoredTensorDict) -> None:
    first = quick.put(worker_pb2.Order(tag=1, discard=worker_pb2.Discard(message_nbytes=[8])))
    second = quick.put(sampling(plain, [4], tag=2))
    with pytest.raises(Empty):
        quick.reports.get_nowait()
    quick.channel.send(torch.zeros(8, dtype=torch.uint8), 1).wait(TIMEOUT_S)
    assert [quick.next_report().order for _ in range(2)] == [first, second]


@pytest.mark.slow
def test_quick_orders_when_there_are_many_then_only_so_many_sends_are_kept(
    quick: Peer, plain: StoredTensorDict
) -> None:
    sizes = make_rows_layout(plain.spec, 1).message_nbytes
    for tag in range(5 * MAX_SENT):
        quick.put(sampling(plain, [tag % 6], tag=tag))
        (content,) = receive(quick, sizes, tag)
        assert content[:8].view(torch.int64).item() == tag % 6
        assert quick.next_report().HasField("done")
    wait_for(lambda: quick.session.lane.num_sent < 2 * MAX_SENT, "the end of the sends")


def test_quick_orders_when_the_client_takes_nothing_then_its_channel_is_lost(plain: StoredTensorDict) -> None:
    peer = Peer(transfer_timeout_s=0.05)
    peer.open_channel()
    numbers = [peer.put(sampling(plain, [tag % 6], tag=tag)) for tag in range(4 * MAX_SENT)]
    reports: list[worker_pb2.Report] = []
    while not reports or not reports[-1].HasField("channel_lost"):
        reports.append(peer.next_report())
    assert {report.order for report in reports[:-1]} <= set(numbers)
    assert "0.05 s" in reports[-1].channel_lost.reason
    peer.close()


def test_channel_when_the_client_goes_then_it_is_lost_and_the_order_may_be_tried_again(peer: Peer) -> None:
    peer.open_channel()
    number = peer.put(worker_pb2.Order(discard=worker_pb2.Discard(message_nbytes=[8])))
    peer.channel.close()
    lost, failed = peer.next_report(), peer.next_report()
    assert failed.order == number
    assert isinstance(decode_failure(failed.failure), TransferAbortedError)
    assert lost.HasField("channel_lost")
    assert (lost.order, lost.session, lost.channel_lost.channel) == (0, peer.session.number, 0)
    assert "it had been open for" in lost.channel_lost.reason


def test_order_when_its_channel_cannot_be_formed_then_the_failure_has_the_reason(peer: Peer) -> None:
    opening = worker_pb2.OpenSession(transport="gloo", host="192.0.2.1", secret=SECRET)
    assert isinstance(peer.error(open_session=opening), ConnectError)
    number = peer.put(worker_pb2.Order(discard=worker_pb2.Discard(message_nbytes=[8])))
    lost, failed = peer.next_report(), peer.next_report()
    assert failed.order == number
    assert "its channel is not open: no connection to 192.0.2.1: gloo: " in str(decode_failure(failed.failure))
    assert lost.channel_lost.reason.endswith("(it had never been open)")


def test_failure_when_the_client_waits_for_bytes_then_its_channel_is_closed_first(peer: Peer) -> None:
    peer.open_channel()
    waiting = peer.channel.recv(torch.zeros(8, dtype=torch.uint8), 3)
    peer.put(worker_pb2.Order(is_accepted=True))  # an order that nobody knows
    assert peer.next_report().HasField("channel_lost")
    with pytest.raises(PeerLostError):
        waiting.wait(TIMEOUT_S)
    assert peer.next_report().HasField("failure")


def test_failure_when_another_thread_closes_the_channel_then_not_reported_before_its_end(
    peer: Peer, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, may_end = Event(), Event()

    def close_slowly(*group: Any) -> None:
        begun.set()
        assert may_end.wait(TIMEOUT_S)
        close_pairs(*group)

    peer.open_channel()
    monkeypatch.setattr(gloo, "close_pairs", close_slowly)
    with ThreadPoolExecutor(1) as thread:
        closing = thread.submit(peer.session.lane.close)
        assert begun.wait(TIMEOUT_S)
        number = peer.put(worker_pb2.Order(discard=worker_pb2.Discard(message_nbytes=[8])))
        try:
            with pytest.raises(Empty):
                peer.reports.get(timeout=0.1)
        finally:
            may_end.set()
        closing.result(TIMEOUT_S)
    assert peer.next_report().order == number


def test_order_when_its_channel_never_forms_then_fails_as_soon_as_the_session_is_closed(
    peer: Peer, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, carry_out = Event(), Lane.carry_out

    def note_begin(lane: Lane, order: worker_pb2.Order) -> None:
        begun.set()
        carry_out(lane, order)

    monkeypatch.setattr(Lane, "carry_out", note_begin)
    number = peer.put(worker_pb2.Order(discard=worker_pb2.Discard(message_nbytes=[8])))
    assert begun.wait(TIMEOUT_S)
    peer.session.close()
    failed = peer.reports.get(timeout=TIMEOUT_S / 2)  # a channel may take as long as all of it
    assert failed.order == number
    assert isinstance(decode_failure(failed.failure), TransferAbortedError)
