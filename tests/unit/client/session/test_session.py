from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress
from functools import partial
from threading import Event
from typing import Any

import pytest
import torch
from tensordict import TensorDict

import tdserve
from tdserve.base.config import DEFAULT_INLINE_BYTES, MAIL_BYTES, MAIL_INLINE_BYTES, PROTOCOL_VERSION
from tdserve.base.deadline import Deadline
from tdserve.base.errors import (
    CapacityError,
    ConnectError,
    DeadlineExceededError,
    InvalidRequestError,
    LocalProtocolError,
    PeerLostError,
    StoreNotFoundError,
    TransferAbortedError,
    TransportError,
)
from tdserve.client.session.requests import abandoned_requests
from tdserve.client.session.requests.abandoned_requests import AbandonedRequests, Brings
from tdserve.client.session.requests.request_numbers import RequestNumbers
from tdserve.client.session.session import Session
from tdserve.client.transfers import download
from tdserve.control.connection import ControlConnection
from tdserve.structure.captures.capture import capture
from tdserve.transport import gloo
from tdserve.transport.proven import close_pairs
from tdserve.v1 import content_pb2, control_pb2
from tests.errors import raises
from tests.processes import wait_for

ROWS = TensorDict({"a": torch.arange(4)}, [4])


@pytest.fixture
def connection(server: tdserve.Server) -> Iterator[ControlConnection]:
    """A connection to the server's control process."""
    made = ControlConnection(server.address)
    yield made
    made.close()


def opened(connection: ControlConnection, client_id: bytes) -> Session:
    """A session of a client of this identity."""
    return Session(connection, client_id=client_id, transport="gloo", requests=RequestNumbers(), timeout_s=10.0)


def test_session_when_opened_then_welcome_and_channel(connection: ControlConnection) -> None:
    session = opened(connection, bytes(16))
    assert session.welcome.protocol_version == PROTOCOL_VERSION
    assert session.contents.get(session.contents.current) is session.contents.get(session.contents.current)
    session.close()
    session.close()
    assert session.is_lost
    with pytest.raises(TransportError):
        session.send(1, read=control_pb2.ReadRequest())


def test_channel_when_it_cannot_be_formed_then_all_waiting_calls_get_one_line_with_the_remedy(
    connection: ControlConnection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TDSERVE_INTERFACE", "192.0.2.1")  # an address that no machine has
    session = opened(connection, bytes(15) + b"\2")
    pending = session.send(1, read=control_pb2.ReadRequest(store="never there", timeout_s=20.0))
    remedy = r"127\.0\.0\.1 must be reachable .* one published port is not enough.*network_mode: host, --advertise"
    with pytest.raises(ConnectError, match=remedy) as raised:
        session.contents.get(session.contents.current)
    assert "\n" not in str(raised.value)
    with pytest.raises(ConnectError, match=remedy):
        pending.wait(10.0, "a read")


def test_channel_when_it_is_not_there_in_time_then_the_same_error_and_the_session_goes_on(
    connection: ControlConnection,
) -> None:
    session = opened(connection, bytes(15) + b"\3")
    with pytest.raises(ConnectError, match=r"within 0 s; content needs gloo.*one published port is not enough"):
        session.contents.await_current(0.0)
    assert not session.is_lost
    session.contents.await_current(10.0)
    assert session.contents.get(session.contents.current) is session.contents.get(session.contents.current)
    session.close()


def test_failure_when_content_on_a_lost_channel_was_the_answer_then_nothing_is_owed_and_all_wait_the_same_second(
    connection: ControlConnection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(abandoned_requests, "SILENT_S", 0.0)
    monkeypatch.setattr(download, "ANSWER_GRACE_S", 0.5)
    session = opened(connection, bytes(15) + b"\4")
    content_channel = session.contents.current
    session.contents.get(content_channel)
    asked = control_pb2.ReadRequest(store="never there", timeout_s=20.0)
    waiting = [session.send(request, content_channel=content_channel, read=asked) for request in range(1, 9)]
    began_s = time.monotonic()
    for pending in waiting:
        error = download.abort_transfer(
            session, pending, PeerLostError(peer="the server", reason="its bytes were lost")
        )
        assert isinstance(error, TransferAbortedError)
    assert time.monotonic() - began_s < 4 * 0.5
    assert session.contents.current.number == 1
    assert not session.is_silent
    assert not session.is_lost
    session.close()


def test_transfer_when_its_channel_is_lost_at_its_deadline_then_nothing_more_is_waited_for(
    connection: ControlConnection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(download, "ANSWER_GRACE_S", 30.0)
    session = opened(connection, bytes(15) + b"\6")
    asked = control_pb2.ReadRequest(store="never there", timeout_s=20.0)
    pending = session.send(1, content_channel=session.contents.current, read=asked)
    deadline, lost = Deadline.after(0.001), PeerLostError(peer="the server", reason="its bytes were lost")
    began_s = time.monotonic()
    error = download.abort_transfer(session, pending, lost, deadline)
    assert isinstance(error, TransferAbortedError)
    assert time.monotonic() - began_s < 20.0
    assert not session.is_lost
    session.close()


def test_give_up_when_another_thread_is_about_it_then_waits_for_the_end_of_that(
    connection: ControlConnection, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, may_end = Event(), Event()

    def close_slowly(*group: Any) -> None:
        begun.set()
        assert may_end.wait(20.0)
        close_pairs(*group)

    session = opened(connection, bytes(15) + b"\5")
    content_channel = session.contents.current
    session.contents.get(content_channel)
    monkeypatch.setattr(gloo, "close_pairs", close_slowly)
    lost = PeerLostError(peer="the server", reason="its bytes were lost")
    with ThreadPoolExecutor(2) as threads:
        giving_up = [threads.submit(session.replace_channel, content_channel, lost)]
        assert begun.wait(20.0)
        assert session.contents.current is not content_channel
        giving_up.append(threads.submit(session.replace_channel, content_channel, lost))
        try:
            assert not wait(giving_up, 0.1).done
        finally:
            may_end.set()
        assert not wait(giving_up, 20.0).not_done
    session.close()


def test_session_when_its_client_opens_another_then_lost(connection: ControlConnection) -> None:
    first = opened(connection, bytes(15) + b"\1")
    pending = first.send(1, read=control_pb2.ReadRequest(store="never there", timeout_s=20.0))
    second = opened(connection, bytes(15) + b"\1")
    with pytest.raises(TransportError):
        pending.wait(10.0, "a read")
    assert not second.is_lost
    second.close()


def test_session_when_hello_is_refused_then_typed_error(connection: ControlConnection) -> None:
    with raises(InvalidRequestError, argument="client_id"):
        opened(connection, b"short")


WAITING = control_pb2.ReadRequest(store="never there", timeout_s=20.0)


def too_long(name: str) -> control_pb2.ReadRequest:
    """A request that waits, and does not fit into a mail."""
    keys = [content_pb2.Path(parts=["k" * MAIL_BYTES])]
    return control_pb2.ReadRequest(store=name, timeout_s=20.0, keys=keys)


@pytest.mark.parametrize(("asked", "is_mailed"), [(WAITING, True), (too_long("never there"), False)])
def test_request_when_cancelled_then_it_ends_and_the_session_goes_on(
    mailing: Session, asked: control_pb2.ReadRequest, is_mailed: bool
) -> None:
    pending = mailing.send(4_000, read=asked)
    mailing.cancel(4_000)
    assert pending.is_mailed == is_mailed
    with raises(TransportError, transfer=4000):
        pending.wait(10.0, "a read")
    assert not mailing.is_lost


def test_inline_bytes_when_mail_is_open_then_what_fits_into_one(mailing: Session) -> None:
    assert mailing.inline_bytes == MAIL_INLINE_BYTES
    assert mailing.welcome.inline_bytes == DEFAULT_INLINE_BYTES


@pytest.mark.slow
def test_requests_when_they_are_many_and_small_then_answered_by_mail_in_order(mailing: Session) -> None:
    asked = control_pb2.ReadRequest(store="not there", fingerprint=b"seen before")
    for request in range(5_000, 5_100):
        pending = mailing.send(request, read=asked)
        assert pending.is_mailed
        with pytest.raises(StoreNotFoundError, match="not there"):
            pending.wait(10.0, "a read")
        mailing.end_request(request)


def test_close_when_requests_wait_as_mail_then_they_end(mailing: Session) -> None:
    pending = mailing.send(4_000, read=WAITING)
    mailing.close()
    with pytest.raises(TransportError):
        pending.wait(10.0, "a read")
    assert mailing.is_lost
    with pytest.raises(TransportError):
        mailing.send(4_001, read=WAITING)


@pytest.fixture
def local_session(local_client: tdserve.Client) -> Session:
    """A session of a local client."""
    return local_client.session(Deadline.after(10.0))


def test_local_requests_when_they_wait_and_are_cancelled_then_they_end_and_the_session_goes_on(
    local_session: Session,
) -> None:
    pending = local_session.send(4_000, read=WAITING)
    local_session.cancel(4_000)
    assert not pending.is_mailed
    with raises(TransportError, transfer=4000):
        pending.wait(10.0, "a read")
    assert not local_session.is_lost


def test_local_session_when_closed_then_what_waits_ends_and_nothing_more_is_sent(local_session: Session) -> None:
    pending = local_session.send(4_000, read=WAITING)
    local_session.close()
    with pytest.raises(TransportError):
        pending.wait(10.0, "a read")
    with pytest.raises(TransportError):
        local_session.send(4_001, read=WAITING)
    local_session.answer(4_001, control_pb2.Written())  # the server has learnt by itself


def test_local_write_when_its_caller_gave_up_before_it_was_let_then_the_rows_are_free(
    local_client: tdserve.Client, local_session: Session, name: str
) -> None:
    queue = local_client.create_queue(name, ROWS[0], 4)
    queue.extend(ROWS)  # full: the next one is allowed when there is room again
    content = control_pb2.Content(fingerprint=capture(ROWS[0]).spec.prepend((4,)).fingerprint)
    asked = control_pb2.ExtendRequest(store=name, num_rows=4, content=content, timeout_s=10.0)
    given_up = local_session.send(4_000, extend=asked, on_permit=lambda accepted: control_pb2.Written())
    given_up.withdraw()
    assert local_session.local is not None
    local_session.local.send(control_pb2.ClientMessage(request=4_002, extend=asked))  # nobody waits for it at all
    queue.ack(queue.take(4, ack=False))
    with pytest.raises(TransportError, match="stopped waiting"):
        given_up.wait(10.0, "an extend")
    assert queue.extend(ROWS).tolist() == [0, 1, 2, 3]
    assert not local_session.is_lost


def test_spooled_values_when_the_caller_gives_up_then_kept_until_the_server_has_answered(
    local_session: Session, name: str
) -> None:
    assert local_session.local is not None
    spooled = local_session.local.spool([bytes(100_000)])
    assert spooled is not None
    waiting = control_pb2.LatestRequest(store=name, timeout_s=20.0)  # of weights that nobody has published
    pending = local_session.send(1, latest=waiting, free=partial(local_session.local.free, spooled))
    with pytest.raises(DeadlineExceededError):
        pending.wait(0.01, "an answer", is_owed=False)
    local_session.end_request(1)
    other = local_session.local.spool([bytes(100_000)])
    assert other is not None
    assert other[0] != spooled[0]
    local_session.cancel(1)
    local = local_session.local

    # Each look keeps what it got: otherwise it could get that again before it gets what the answer frees.
    wait_for(lambda: local.spool([bytes(100_000)]) == spooled, "the server's answer")


def test_local_write_when_it_cannot_be_done_then_the_caller_gets_the_reason_and_the_rows_are_free(
    local_client: tdserve.Client, local_session: Session, name: str
) -> None:
    def full(accepted: control_pb2.Accepted) -> control_pb2.Written:
        raise CapacityError(what="a disk", asked=2, free=1)

    table = local_client.create_replay(name, ROWS[0], 4)
    content = control_pb2.Content(fingerprint=capture(ROWS[0]).spec.prepend((4,)).fingerprint)
    asked = control_pb2.ExtendRequest(store=name, num_rows=4, content=content, timeout_s=10.0)
    with pytest.raises(CapacityError, match="a disk"):
        local_session.send(4_000, extend=asked, on_permit=full).wait(10.0, "an extend")
    assert len(table.extend(ROWS)) == 4


def test_local_write_when_it_fails_by_a_fault_of_ours_then_the_session_ends_and_the_rows_are_free(
    local_client: tdserve.Client, local_session: Session, name: str
) -> None:
    def broken(accepted: control_pb2.Accepted) -> control_pb2.Written:
        raise ZeroDivisionError

    table = local_client.create_replay(name, ROWS[0], 4)
    content = control_pb2.Content(fingerprint=capture(ROWS[0]).spec.prepend((4,)).fingerprint)
    asked = control_pb2.ExtendRequest(store=name, num_rows=4, content=content, timeout_s=10.0)
    pending = local_session.send(4_000, extend=asked, on_permit=broken)
    with pytest.raises(LocalProtocolError, match="see the log"):
        pending.wait(10.0, "an extend")
    assert local_session.is_lost
    assert len(table.extend(ROWS)) == 4


def test_answer_when_its_caller_gives_up_while_it_is_looked_up_then_nothing_is_owed(
    connection: ControlConnection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(abandoned_requests, "SILENT_S", 0.0)
    session = opened(connection, bytes(15) + b"\7")
    sent, has_given_up, look = Event(), Event(), AbandonedRequests.look

    def look_and_give_up(self: AbandonedRequests, message: control_pb2.ServerMessage) -> Brings:
        found = look(self, message)
        if message.request == 1 and not has_given_up.is_set():
            assert sent.wait(20.0)
            has_given_up.set()
            with suppress(DeadlineExceededError):
                pending.wait(0.0, "an answer")
            session.end_request(1)
        return found

    monkeypatch.setattr(AbandonedRequests, "look", look_and_give_up)
    pending = session.send(1, latest=control_pb2.LatestRequest(store="never there", timeout_s=0.0))
    sent.set()
    assert has_given_up.wait(20.0)
    wait_for(lambda: not session.is_silent, "the answer")
    session.close()
