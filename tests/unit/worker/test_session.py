from __future__ import annotations

from queue import Empty

import pytest
import torch

from tdserve.content import rows_layout
from tdserve.control.status import decode_failure
from tdserve.errors import LocalProtocolError, PeerLostError, RemoteProtocolError
from tdserve.transport.mail import MAX_SENT
from tdserve.v1 import worker_pb2
from tests.integration.processes import wait_for
from tests.unit.worker.peer import TIMEOUT_S, Peer, StoredTensorDict, receive, sampling


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


@pytest.fixture
def quick(peer: Peer, plain: StoredTensorDict) -> Peer:
    """With an open channel, and a store of which few rows are sent at once."""
    peer.open_channel()
    peer.put(sampling(plain, [0]))
    receive(peer, rows_layout(plain.spec, 1).message_nbytes, 0)
    assert peer.next_report().HasField("done")  # it is mapped
    wait_for(lambda: peer.session._num_done == peer.session._num_queued, "the end of that order")
    return peer


def test_quick_order_when_nothing_is_queued_then_done_before_put_returns(quick: Peer, plain: StoredTensorDict) -> None:
    sizes = rows_layout(plain.spec, 2).message_nbytes
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


def test_quick_orders_when_there_are_many_then_only_so_many_sends_are_kept(
    quick: Peer, plain: StoredTensorDict
) -> None:
    sizes = rows_layout(plain.spec, 1).message_nbytes
    for tag in range(5 * MAX_SENT):
        quick.put(sampling(plain, [tag % 6], tag=tag))
        (content,) = receive(quick, sizes, tag)
        assert content[:8].view(torch.int64).item() == tag % 6
        assert quick.next_report().HasField("done")
    wait_for(lambda: len(quick.session._sent) < 2 * MAX_SENT, "the end of the sends")


def test_quick_orders_when_the_client_takes_nothing_then_its_session_is_lost(plain: StoredTensorDict) -> None:
    peer = Peer(transfer_timeout_s=0.05)
    peer.open_channel()
    numbers = [peer.put(sampling(plain, [tag % 6], tag=tag)) for tag in range(4 * MAX_SENT)]
    reports: list[worker_pb2.Report] = []
    while not reports or not reports[-1].HasField("session_lost"):
        reports.append(peer.next_report())
    assert {report.order for report in reports[:-1]} <= set(numbers)
    assert "0.05 s" in reports[-1].session_lost.reason
    peer.close()


def test_mail_when_its_channel_is_not_formed_then_forgotten_and_the_session_goes_on(peer: Peer) -> None:
    peer.session.put(worker_pb2.Order(session=7, mail=b"an answer"))
    assert isinstance(peer.error(), RemoteProtocolError)


def test_mail_when_its_channel_is_formed_then_both_ways_beside_the_content(peer: Peer) -> None:
    peer.open_channel()
    mail = peer.open_mail()
    mail.send(b"a question")
    report = peer.next_report()
    assert (report.order, report.mail) == (0, b"a question")
    peer.put(worker_pb2.Order(tag=1, discard=worker_pb2.Discard(message_nbytes=[8])))
    peer.session.put(worker_pb2.Order(session=7, mail=b"an answer"))  # not behind what moves
    assert peer.mails.get(timeout=TIMEOUT_S) == b"an answer"
    peer.channel.send(torch.zeros(8, dtype=torch.uint8), 1).wait(TIMEOUT_S)
    assert peer.next_report().HasField("done")


def test_mail_when_there_is_much_then_reaped_in_the_sessions_thread(peer: Peer) -> None:
    mail = peer.open_mail()
    for number in range(5 * MAX_SENT):
        peer.session.put(worker_pb2.Order(session=7, mail=str(number).encode()))
        assert int(peer.mails.get(timeout=TIMEOUT_S)) == number
    worker_mail = peer.session._mailbox._mail
    assert worker_mail is not None
    wait_for(lambda: worker_mail.num_sent < 2 * MAX_SENT, "the end of the sends")
    assert mail.num_sent == 0


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


def test_order_when_its_channel_never_forms_then_fails_as_soon_as_the_session_is_closed(peer: Peer) -> None:
    number = peer.put(worker_pb2.Order(discard=worker_pb2.Discard(message_nbytes=[8])))
    wait_for(peer.session._orders.empty, "the session's thread to take it")
    peer.session.close()
    failed = peer.reports.get(timeout=TIMEOUT_S / 2)  # a channel may take as long as all of it
    assert failed.order == number
    assert isinstance(decode_failure(failed.failure), PeerLostError)
