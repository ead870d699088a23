from __future__ import annotations

from typing import Any

import pytest
import torch

from tdserve.base.config import MAIL_READ
from tdserve.base.errors import PeerLostError, RemoteProtocolError, TransferAbortedError
from tdserve.control.status import decode_failure
from tdserve.messages.content import make_rows_layout
from tdserve.transport.message_channel import MAX_SENT, MessageChannel
from tdserve.v1 import worker_pb2
from tdserve.worker import worker_session
from tdserve.worker.lane import Lane
from tests.processes import wait_for
from tests.unit.worker.peer import TIMEOUT_S, Peer, StoredTensorDict, receive, sampling


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


def test_mail_when_the_channel_for_content_is_replaced_meanwhile_then_read_all_the_same(
    peer: Peer, monkeypatch: pytest.MonkeyPatch
) -> None:
    peer.open_channel()
    mail = peer.open_mail()
    is_idle = Lane.is_idle.fget  # type: ignore[attr-defined]

    def look(lane: Lane) -> bool:
        found: bool = is_idle(lane)
        peer.session.lane.close()
        return found

    monkeypatch.setattr(Lane, "is_idle", property(look))
    for _ in range(2):
        mail.send(b"a question", MAIL_READ)
        assert peer.next_report().mail == b"a question"


def test_mail_when_there_is_much_then_reaped_in_the_sessions_thread(
    peer: Peer, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = list[MessageChannel]()

    def make_mail(*arguments: Any, **options: Any) -> MessageChannel:
        made.append(MessageChannel(*arguments, **options))
        return made[-1]

    monkeypatch.setattr(worker_session, "MessageChannel", make_mail)
    mail = peer.open_mail()
    (worker_mail,) = made
    for number in range(5 * MAX_SENT):
        peer.session.put(worker_pb2.Order(session=7, mail=str(number).encode()))
        assert int(peer.mails.get(timeout=TIMEOUT_S)) == number
    wait_for(lambda: worker_mail.num_sent < 2 * MAX_SENT, "the end of the sends")
    assert mail.num_sent == 0


def test_channel_when_the_session_is_closed_then_there_is_none(peer: Peer) -> None:
    peer.open_channel()
    peer.close()
    with pytest.raises(PeerLostError, match="session 7"):
        _ = peer.session.lane.channel


def test_close_when_the_rendezvous_is_under_way_then_it_ends(peer: Peer) -> None:
    peer.put(worker_pb2.Order(open_session=worker_pb2.OpenSession(transport="gloo", host="127.0.0.1")))
    peer.session.close()
    assert peer.next_report().HasField("failure")


def test_close_channel_when_orders_use_it_then_they_fail_and_the_next_one_is_formed_with_a_proof_of_its_own(
    peer: Peer, plain: StoredTensorDict
) -> None:
    peer.open_channel()
    moving, waiting = (peer.put(worker_pb2.Order(discard=worker_pb2.Discard(message_nbytes=[8]))) for _ in range(2))
    peer.session.put(worker_pb2.Order(session=7, close_channel=worker_pb2.CloseChannel()))
    failed = [peer.next_report() for _ in range(2)]
    assert [report.order for report in failed] == [moving, waiting]  # and no word of the channel, which control knows
    assert all(isinstance(decode_failure(report.failure), TransferAbortedError) for report in failed)
    late = peer.put(worker_pb2.Order(discard=worker_pb2.Discard(message_nbytes=[8])))
    refused = peer.next_report()
    assert (refused.order, type(decode_failure(refused.failure))) == (late, TransferAbortedError)
    peer.open_channel(1)
    order = sampling(plain, [4, 1], tag=3)
    order.channel = 1
    peer.put(order)
    (content,) = receive(peer, make_rows_layout(plain.spec, 2).message_nbytes, 3)
    assert content[:16].view(torch.int64).tolist() == [4, 1]
    assert peer.next_report().HasField("done")


def test_order_when_of_a_later_channel_then_the_one_before_is_closed_and_mail_goes_on(peer: Peer) -> None:
    peer.open_channel()
    mail = peer.open_mail()
    first = peer.channel
    peer.open_channel(3)
    with pytest.raises(PeerLostError):
        first.recv(torch.zeros(8, dtype=torch.uint8), 3).wait(TIMEOUT_S)
    mail.send(b"a question")
    assert peer.next_report().mail == b"a question"
    assert peer.session.lane.channel_number == 3
