from __future__ import annotations

from collections.abc import Iterator

import pytest

import tdserve
from tdserve.client.session import Pending, Session, address_towards, checked
from tdserve.config import DEFAULT_INLINE_BYTES, MAIL_BYTES, MAIL_INLINE_BYTES, PROTOCOL_VERSION
from tdserve.control.connection import ControlConnection
from tdserve.control.status import encode_failure
from tdserve.deadline import Deadline
from tdserve.errors import (
    ConnectError,
    DeadlineExceededError,
    InvalidRequestError,
    PeerLostError,
    StoreNotFoundError,
    TransportError,
)
from tdserve.v1 import content_pb2, control_pb2
from tests.integration.processes import wait_for

FAILURE = control_pb2.ServerMessage(failure=encode_failure(StoreNotFoundError(name="x")))


def test_wait_when_answered_then_in_order() -> None:
    pending = Pending(on_silence=lambda: None)
    for request in (1, 2):
        pending.put(control_pb2.ServerMessage(request=request))
    assert [pending.wait(1.0, "").request for _ in range(2)] == [1, 2]


def test_wait_when_nothing_comes_then_deadline_and_silence_is_told() -> None:
    told: list[str] = []
    pending = Pending(on_silence=lambda: told.append("silence"))
    with pytest.raises(DeadlineExceededError, match="an answer to a miracle"):
        pending.wait(0.01, "a miracle")
    assert told == ["silence"]


@pytest.mark.parametrize(
    ("answer", "error"), [(FAILURE, StoreNotFoundError), (PeerLostError(peer="a", reason="b"), PeerLostError)]
)
def test_wait_when_it_failed_then_raised(
    answer: control_pb2.ServerMessage | PeerLostError, error: type[Exception]
) -> None:
    pending = Pending(on_silence=lambda: None)
    pending.put(answer)
    with pytest.raises(error):
        pending.wait(1.0, "")
    assert pending.has_failed
    with pytest.raises(error):
        checked(answer)


@pytest.fixture
def connection(server: tdserve.Server) -> Iterator[ControlConnection]:
    """To the server's control process."""
    made = ControlConnection(server.address)
    yield made
    made.close()


def opened(connection: ControlConnection, client_id: bytes) -> Session:
    """A session of a client of this identity."""
    return Session(connection, client_id=client_id, transport="gloo", oldest_request=1, timeout_s=10.0)


def test_session_when_opened_then_welcome_and_channel(connection: ControlConnection) -> None:
    session = opened(connection, bytes(16))
    assert session.welcome.protocol_version == PROTOCOL_VERSION
    assert session.channel is session.channel
    session.close()
    session.close()
    assert session.is_lost
    with pytest.raises(TransportError):
        session.send(1, read=control_pb2.ReadRequest())


def test_session_when_its_client_opens_another_then_lost(connection: ControlConnection) -> None:
    first = opened(connection, bytes(15) + b"\1")
    pending = first.send(1, read=control_pb2.ReadRequest(store="never there", timeout_s=20.0))
    second = opened(connection, bytes(15) + b"\1")
    with pytest.raises(TransportError):
        pending.wait(10.0, "a read")
    assert not second.is_lost
    second.close()


def test_session_when_hello_is_refused_then_typed_error(connection: ControlConnection) -> None:
    with pytest.raises(InvalidRequestError, match="client_id"):
        opened(connection, b"short")


@pytest.fixture
def mailing(client: tdserve.Client) -> Session:
    """A session whose small messages ride a channel already."""
    session = client.session(Deadline.after(10.0))
    mailbox = session._mailbox
    assert mailbox is not None
    wait_for(lambda: mailbox.is_open, "the opening of the mailbox")
    return session


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
    with pytest.raises(TransportError, match="4000"):
        pending.wait(10.0, "a read")
    assert not mailing.is_lost


def test_inline_bytes_when_mail_is_open_then_what_fits_into_one(mailing: Session) -> None:
    assert mailing.inline_bytes == MAIL_INLINE_BYTES
    assert mailing.welcome.inline_bytes == DEFAULT_INLINE_BYTES


def test_requests_when_they_are_many_and_small_then_answered_by_mail_in_order(mailing: Session) -> None:
    asked = control_pb2.ReadRequest(store="not there", fingerprint=b"seen before")
    for request in range(5_000, 5_100):
        pending = mailing.send(request, read=asked)
        assert pending.is_mailed
        with pytest.raises(StoreNotFoundError, match="not there"):
            pending.wait(10.0, "a read")
        mailing.forget(request)


def test_close_when_requests_wait_as_mail_then_they_end(mailing: Session) -> None:
    pending = mailing.send(4_000, read=WAITING)
    mailing.close()
    with pytest.raises(TransportError):
        pending.wait(10.0, "a read")
    assert mailing.is_lost
    with pytest.raises(TransportError):
        mailing.send(4_001, read=WAITING)


def test_address_towards_when_the_name_resolves_then_ours() -> None:
    assert address_towards("127.0.0.1:1") == "127.0.0.1"
    assert address_towards("[::1]:1") == "::1"


def test_address_towards_when_it_does_not_then_connect_error() -> None:
    with pytest.raises(ConnectError, match="does not resolve"):
        address_towards("no.such.name.invalid:1")
