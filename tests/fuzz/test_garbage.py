"""Bytes that do not belong to the protocol, on every port of a server and on the socket in its root. Others do not
notice."""

from __future__ import annotations

import random
import socket
import struct
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from threading import Event
from typing import Any

import grpc
import pytest

import tdserve
from tdserve.control.local import SOCKET_NAME
from tests.fuzz.hostile_session import HostileSession
from tests.fuzz.inputs import Inputs
from tests.fuzz.requests import make_requests, make_rows, make_stores
from tests.integration.logged_server import LoggedServer, run_server
from tests.processes import all_below, listening_ports, workers_of

pytestmark = pytest.mark.integration

NUM_CONNECTIONS = 40
"""For each port."""

HTTP2_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
SETTINGS_FRAME = b"\0\0\0\4\0\0\0\0\0"
ANSWER_S = 30.0
HELLO_S = 40.0
"""Above the ten seconds within which a session must greet, on a busy machine."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LoggedServer]:
    log = tmp_path_factory.mktemp("garbage") / "log"
    with run_server(log, "--metrics-port", "0", "--log-level", "warning") as started:
        yield started


@pytest.fixture(scope="module")
def client(server: LoggedServer) -> Iterator[tdserve.Client]:
    with tdserve.connect(server.address, transport="gloo", timeout_s=60.0) as connected:
        make_stores(connected)
        yield connected


@pytest.fixture(autouse=True)
def _others_go_on(server: LoggedServer, client: tdserve.Client) -> Iterator[None]:
    """Checks after each attack that calls of another client work, and that the log has no fault."""
    restarts = client.stats()["workers"][0]["num_restarts"]
    yield
    ring = client.replay("ring")
    rows = ring.extend(make_rows())
    assert (ring[rows]["n", "y"] == make_rows()["n", "y"]).all()
    assert client.stats()["workers"][0]["num_restarts"] == restarts
    assert [line for line in server.lines() if " ERROR " in line or "Traceback" in line] == []


def make_garbage(rng: random.Random) -> Iterator[bytes]:
    """Yields beginnings of connections: noise, and what resembles HTTP/2, HTTP, TLS, or gloo."""
    for _ in range(NUM_CONNECTIONS):
        noise = rng.randbytes(rng.choice((1, 8, 9, 100, 5_000)))
        start = rng.choice((b"", HTTP2_PREFACE, HTTP2_PREFACE + SETTINGS_FRAME, b"GET / HTTP/1.1\r\n", b"\x16\x03\x01"))
        yield start + rng.choice((b"", struct.pack("<q", 2**62), b"\xff" * 9)) + noise


def send_garbage(address: str | tuple[str, int], content: bytes) -> None:
    """Opens a connection, sends bytes, and closes it, or lets the other end do so."""
    family = socket.AF_UNIX if isinstance(address, str) else socket.AF_INET
    with socket.socket(family) as connection, suppress(OSError):
        connection.settimeout(0.05)
        connection.connect(address)
        connection.sendall(content)
        connection.recv(1 << 16)


@pytest.mark.slow
def test_ports_when_they_get_garbage_then_others_go_on(server: LoggedServer, client: tdserve.Client) -> None:
    pid = server.process.pid
    ports = {port for each in (pid, *all_below(pid), *workers_of(pid)) for port in listening_ports(each)}
    assert len(ports) >= 3  # of gRPC, of the observer, of gloo
    rng = random.Random(7)
    for port in sorted(ports):
        for content in make_garbage(rng):
            send_garbage(("127.0.0.1", port), content)


def test_local_socket_when_it_gets_garbage_then_others_go_on(server: LoggedServer, client: tdserve.Client) -> None:
    path, inputs = str(Path(str(client.stats()["root"]), SOCKET_NAME)), Inputs(9)
    frames = [struct.pack("<I", len(content)) + content for content in map(_serialise, make_requests())]
    for frame in frames:
        send_garbage(path, inputs.mutate(frame))
    with tdserve.connect(server.address, transport="shm", timeout_s=60.0) as local:
        assert "ring" in local.stores()


def _serialise(message: object) -> bytes:
    content: bytes = message.SerializeToString()  # type: ignore[attr-defined]
    return content


def test_calls_when_their_messages_are_garbage_then_refused_with_a_code(
    server: LoggedServer, client: tdserve.Client
) -> None:
    rng, codes = random.Random(11), set()
    with grpc.insecure_channel(server.address) as channel:
        for method in ("DescribeStore", "ListStores", "ListKeys", "GetStats", "Observe", "Nothing"):
            call = channel.unary_unary(f"/tdserve.v1.ControlService/{method}")  # type: ignore[call-arg]
            for _ in range(10):
                try:
                    call(rng.randbytes(rng.choice((0, 1, 20, 400))), timeout=ANSWER_S)
                except grpc.RpcError as error:
                    codes.add(error.code())
    refusals = {grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.NOT_FOUND, grpc.StatusCode.UNIMPLEMENTED}
    assert grpc.StatusCode.INVALID_ARGUMENT in codes
    assert codes <= refusals


def test_content_stream_when_its_frames_are_garbage_then_only_its_session_notices(
    server: LoggedServer, client: tdserve.Client
) -> None:
    rng = random.Random(13)
    for _ in range(6):
        session = HostileSession(server.address, transport="grpc")
        welcome = session.welcome
        stream = session.connection.open_content(welcome.session, 0, welcome.secret)
        with suppress(tdserve.TDServeError):
            stream.write([memoryview(rng.choice((b"", struct.pack("<BIQ", 0, 0x7464_7365, 0))) + rng.randbytes(3_000))])
            stream.read_into(memoryview(bytearray(1 << 20)))  # until the worker closes its end
        stream.close()
        session.close()


def test_session_when_it_never_greets_then_it_ends(server: LoggedServer, client: tdserve.Client) -> None:
    num_before = len(client.stats()["sessions"])
    with grpc.insecure_channel(server.address) as channel:
        ended = Event()

        def send_nothing() -> Iterator[bytes]:
            ended.wait(HELLO_S)
            yield from ()

        call = channel.stream_stream("/tdserve.v1.ControlService/Session")  # type: ignore[call-arg]
        answers: Any = call(send_nothing(), timeout=HELLO_S)
        with pytest.raises(grpc.RpcError) as caught:
            next(answers)
        ended.set()
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert len(client.stats()["sessions"]) == num_before
