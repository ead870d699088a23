from __future__ import annotations

import errno
import gc
import os
import socket
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from typing import Any

import grpc
import pytest

from tdserve.base.errors import (
    ClosedError,
    ConnectError,
    NotLocalError,
    RemoteProtocolError,
    TDServeError,
    WrongStateError,
)
from tdserve.base.tls import TLS
from tdserve.cli.serving.certs import make_authority
from tdserve.control import connection as connection_module
from tdserve.control.connection import ControlConnection, SessionStream, check_health
from tdserve.v1 import control_pb2
from tests.processes import quiet_port, wait_for
from tests.unit.control.serving import Answering, same, serving

TIMEOUT_S = 30.0


@pytest.fixture
def free_port() -> int:
    """A port on which nobody listens."""
    return quiet_port()


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """A server whose session breaks with a typed error when told to."""
    with serving(Answering({"session": WrongStateError(state="a", event="b")})) as found:
        yield found


@pytest.fixture
def connection(address: str) -> Iterator[ControlConnection]:
    """A connection to it."""
    made = ControlConnection(address)
    yield made
    made.close()


class Listener:
    """A session stream and what it said."""

    def __init__(self, connection: ControlConnection) -> None:
        self.messages: SimpleQueue[control_pb2.ServerMessage] = SimpleQueue()
        self.ends: SimpleQueue[TDServeError] = SimpleQueue()
        self.stream: SessionStream = connection.open_session(on_message=self.messages.put, on_lost=self.ends.put)

    def send(self, request: int) -> None:
        self.stream.send(control_pb2.ClientMessage(request=request))


def test_call_when_answered_then_the_answer(connection: ControlConnection) -> None:
    answer = connection.call("ListStores", control_pb2.ListStoresRequest(prefix="p"), timeout_s=TIMEOUT_S)
    assert list(answer.names) == ["p"]


def test_call_when_the_port_is_closed_then_connect_error(free_port: int) -> None:
    connection = ControlConnection(f"127.0.0.1:{free_port}")
    with pytest.raises(ConnectError) as raised:
        connection.call("GetStats", control_pb2.GetStatsRequest(), timeout_s=0.1)
    assert raised.value.address == f"127.0.0.1:{free_port}"
    connection.close()


def test_call_when_the_server_comes_later_then_answered(free_port: int) -> None:
    connection = ControlConnection(f"127.0.0.1:{free_port}")
    with ThreadPoolExecutor(1) as thread:
        request = control_pb2.GetStatsRequest()
        calling = thread.submit(connection.call, "GetStats", request, timeout_s=TIMEOUT_S)
        with serving(Answering(), port=free_port):
            assert calling.result(TIMEOUT_S).server_id == "test"
    connection.close()


def test_connection_when_closed_then_every_use_raises_closed_error(address: str) -> None:
    connection = ControlConnection(address)
    connection.close()
    for use in (
        lambda: connection.call("GetStats", control_pb2.GetStatsRequest(), timeout_s=TIMEOUT_S),
        lambda: connection.wait_ready(TIMEOUT_S),
        lambda: Listener(connection),
    ):
        with pytest.raises(ClosedError, match=f"the client of {address} is closed"):
            use()


@pytest.mark.parametrize("waiting", ["call", "wait_ready"])
def test_connection_when_closed_while_another_thread_waits_then_that_one_gets_closed_error(
    free_port: int, waiting: str
) -> None:
    connection = ControlConnection(f"127.0.0.1:{free_port}")
    with ThreadPoolExecutor(1) as thread:
        if waiting == "call":
            waits = thread.submit(connection.call, "GetStats", control_pb2.GetStatsRequest(), timeout_s=TIMEOUT_S)
        else:
            waits = thread.submit(connection.wait_ready, TIMEOUT_S)
        connection.close()
        with pytest.raises(ClosedError, match="the client of"):
            waits.result(TIMEOUT_S)


def test_wait_ready_when_this_process_may_open_no_more_files_then_the_error_names_the_limit(
    monkeypatch: pytest.MonkeyPatch, free_port: int
) -> None:
    def refuse(*arguments: object) -> int:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    connection = ControlConnection(f"127.0.0.1:{free_port}")
    with monkeypatch.context() as full:
        full.setattr(os, "open", refuse)
        with pytest.raises(ConnectError, match=r"too many open files \(ulimit -n\)"):
            connection.wait_ready(0.1)
    connection.close()


class Names:
    """A resolver for the name ``moving``, whose address changes. It replaces a network's."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.addresses: list[str] = []
        monkeypatch.setattr(connection_module, "resolve", self)

    def __call__(self, address: str, *, timeout_s: float = 0.0, **_: object) -> list[str]:
        if not self.addresses:
            raise ConnectError(address=address, reason="the name does not resolve")
        return self.addresses


def test_call_when_the_name_does_not_resolve_then_connect_error(monkeypatch: pytest.MonkeyPatch, address: str) -> None:
    names = Names(monkeypatch)
    connection = ControlConnection(address)
    for call in (lambda: connection.call("GetStats", None, timeout_s=0.1), lambda: connection.wait_ready(0.1)):
        with pytest.raises(ConnectError, match="does not resolve"):
            call()
    names.addresses = ["127.0.0.1"]
    connection.wait_ready(TIMEOUT_S)
    connection.close()


def test_call_when_the_error_is_not_retryable_then_the_server_is_asked_once() -> None:
    handlers = Answering({"a": NotLocalError(address="there", reason="another machine")})
    with serving(handlers) as address:
        connection = ControlConnection(address)
        with pytest.raises(NotLocalError, match="another machine"):
            connection.call("DescribeStore", control_pb2.DescribeStoreRequest(name="a"), timeout_s=1.0)
        connection.close()
    assert handlers.asked == ["a"]


@pytest.mark.slow
def test_wait_ready_when_the_name_has_another_address_then_begins_anew_and_leaves_calls_alone(
    monkeypatch: pytest.MonkeyPatch, address: str
) -> None:
    names, opened, open_channel = Names(monkeypatch), list[str](), grpc.insecure_channel

    def note_channel(target: str, **options: Any) -> grpc.Channel:
        opened.append(target)
        return open_channel(target, **options)

    monkeypatch.setattr(grpc, "insecure_channel", note_channel)
    names.addresses = ["127.0.0.1"]
    connection = ControlConnection(address)
    connection.wait_ready(TIMEOUT_S)
    peer = Listener(connection)
    connection.wait_ready(TIMEOUT_S)
    assert opened == [address]
    names.addresses = ["127.0.0.2"]
    connection.wait_ready(TIMEOUT_S)
    assert opened == [address, address]
    gc.collect()
    peer.send(1)
    assert peer.messages.get(timeout=TIMEOUT_S).request == 1
    peer.stream.close()
    connection.close()


def test_wait_ready_when_the_port_is_closed_then_the_error_names_the_remedy(free_port: int) -> None:
    connection = ControlConnection(f"127.0.0.1:{free_port}")
    with pytest.raises(ConnectError, match="tdserve serve ROOT"):
        connection.wait_ready(0.05)
    connection.close()


def test_wait_ready_when_it_listens_then_returns(connection: ControlConnection) -> None:
    connection.wait_ready(TIMEOUT_S)


def test_session_when_messages_are_sent_then_answers_come_in_order(connection: ControlConnection) -> None:
    peer = Listener(connection)
    for request in range(20):
        peer.send(request)
    assert [peer.messages.get(timeout=TIMEOUT_S).request for _ in range(20)] == list(range(20))
    peer.stream.close()
    assert isinstance(peer.ends.get(timeout=TIMEOUT_S), TDServeError)


def test_session_when_the_server_ends_it_then_lost_once(connection: ControlConnection) -> None:
    peer = Listener(connection)
    peer.send(99)
    assert isinstance(peer.ends.get(timeout=TIMEOUT_S), ConnectError)
    peer.stream.close()
    peer.stream.close()
    assert peer.ends.empty()


def test_session_when_it_fails_then_lost_with_the_servers_error(connection: ControlConnection) -> None:
    peer = Listener(connection)
    peer.send(98)
    assert same(peer.ends.get(timeout=TIMEOUT_S), WrongStateError(state="a", event="b"))


@pytest.mark.parametrize("request_number", [98, 99])
def test_session_when_it_is_lost_then_its_stream_is_freed(connection: ControlConnection, request_number: int) -> None:
    peer = Listener(connection)
    stream = weakref.ref(peer.stream)
    peer.send(request_number)
    peer.ends.get(timeout=TIMEOUT_S)
    del peer

    def is_freed() -> bool:
        gc.collect()
        return stream() is None

    wait_for(is_freed, "the end of the stream")


@pytest.mark.parametrize("is_serving", [True, False])
def test_check_health_when_the_server_answers_then_its_status(is_serving: bool) -> None:
    with serving(Answering(), is_serving=is_serving, token="secret") as address:
        assert check_health(address, timeout_s=TIMEOUT_S) is is_serving


def test_check_health_when_the_port_is_closed_then_connect_error(free_port: int) -> None:
    with pytest.raises(ConnectError):
        check_health(f"127.0.0.1:{free_port}", timeout_s=0.5)


def test_call_when_the_server_is_another_program_then_remote_protocol_error() -> None:
    server = grpc.server(ThreadPoolExecutor(1))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    connection = ControlConnection(f"127.0.0.1:{port}")
    with pytest.raises(RemoteProtocolError, match="a server without its service"):
        connection.call("ListStores", control_pb2.ListStoresRequest(), timeout_s=TIMEOUT_S)
    connection.close()
    server.stop(None).wait(TIMEOUT_S)


def test_wait_ready_when_the_port_is_refused_then_warns_at_once_and_raises_in_the_end(
    free_port: int, caplog: pytest.LogCaptureFixture
) -> None:
    connection = ControlConnection(f"127.0.0.1:{free_port}")
    with pytest.raises(ConnectError, match=r"connection refused for 1\.5 s; is a server running"):
        connection.wait_ready(1.5)
    connection.close()
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert f"no server answers at 127.0.0.1:{free_port} yet: connection refused" in record.getMessage()


def test_explain_silence_when_something_else_listens_then_it_does_not_answer() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        connection = ControlConnection(f"127.0.0.1:{silent.getsockname()[1]}")
        found = connection.explain_silence(2.0)
        assert found == "it listens there and does not answer for 2 s; the server may be starting, or busy"
        connection.close()


def test_call_when_what_listens_closes_the_connection_then_tries_again_until_the_deadline(tmp_path: Path) -> None:
    make_authority(tmp_path, 2)
    with socket.create_server(("127.0.0.1", 0)) as forwarder:  # whose server has not started yet
        num_accepted = 0

        def close_each() -> None:
            nonlocal num_accepted
            with suppress(OSError):
                while True:
                    forwarder.accept()[0].close()
                    num_accepted += 1

        closing = Thread(target=close_each)
        closing.start()
        connection = ControlConnection(f"127.0.0.1:{forwarder.getsockname()[1]}", tls=TLS(ca=tmp_path / "ca.pem"))
        with pytest.raises(ConnectError, match="the connection was closed"):
            connection.call("ListStores", control_pb2.ListStoresRequest(), timeout_s=1.5)
        connection.close()
        forwarder.shutdown(socket.SHUT_RDWR)
        closing.join()
    assert num_accepted > 3
