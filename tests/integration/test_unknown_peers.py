"""Memory that a server uses for peers without a token, and for waiting small requests."""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from queue import SimpleQueue
from threading import Thread

import grpc
import pytest

import tdserve
from tdserve.base.config import PROTOCOL_VERSION
from tdserve.base.ids import make_client_id
from tdserve.control.connection import ControlConnection
from tdserve.control.control_pb2_grpc import ControlServiceStub
from tdserve.control.local import SOCKET_NAME
from tdserve.v1 import control_pb2
from tests.processes import wait_for

pytestmark = pytest.mark.integration

MIB = 1 << 20
GROWTH_MIB = 60
"""Memory of buffers of gRPC and of sockets. Without a limit each test would take at least twice as much."""


def peak_mib(pid: int) -> int:
    """Returns the most memory that a process has ever used."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) // 1024


@pytest.fixture
def guarded(tmp_path: Path) -> Iterator[tdserve.Server]:
    """A server that requires a token."""
    (tmp_path / "token").write_text("right")
    with tdserve.Server(tmp_path / "root", port=0, token_file=str(tmp_path / "token")) as server:
        yield server


@pytest.mark.full
def test_calls_when_they_lack_the_token_then_the_server_holds_nothing_of_them(guarded: tdserve.Server) -> None:
    before, codes = peak_mib(guarded.pid), []
    request = control_pb2.DescribeStoreRequest(name="x" * (200 * MIB))

    def attack() -> None:
        options = [("grpc.max_send_message_length", -1), ("grpc.use_local_subchannel_pool", 1)]
        with grpc.insecure_channel(guarded.address, options=options) as channel:
            try:
                ControlServiceStub(channel).DescribeStore(request, timeout=60)
            except grpc.RpcError as error:
                codes.append(error.code())

    threads = [Thread(target=attack) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert codes == [grpc.StatusCode.UNAUTHENTICATED] * 4
    assert peak_mib(guarded.pid) - before < GROWTH_MIB


def test_local_socket_when_strangers_send_then_they_are_shut_out_and_nothing_is_held(tmp_path: Path) -> None:
    with tdserve.Server(tmp_path / "root") as server:
        before = peak_mib(server.pid)
        with ExitStack() as stack:
            for _ in range(8):
                peer = stack.enter_context(socket.socket(socket.AF_UNIX))
                peer.settimeout(30.0)
                peer.connect(str(tmp_path / "root" / SOCKET_NAME))
                with suppress(BrokenPipeError, ConnectionResetError):
                    peer.sendall(struct.pack("<I", 128 * MIB))
                    for _ in range(127):
                        peer.sendall(bytes(MIB))
                    pytest.fail("all of it was taken")
        with server.client(transport="shm") as client:
            assert client.stores() == []
        assert peak_mib(server.pid) - before < GROWTH_MIB


@pytest.fixture
def small(tmp_path: Path) -> Iterator[tdserve.Server]:
    """A server that holds at most 16 MiB of requests."""
    with tdserve.Server(tmp_path / "root", memory_limit_bytes=16 * MIB) as server:
        yield server


@pytest.mark.slow
def test_requests_when_they_are_small_and_wait_then_those_beyond_the_limit_are_refused(small: tdserve.Server) -> None:
    refused: SimpleQueue[control_pb2.ServerMessage] = SimpleQueue()
    connection = ControlConnection(small.address)
    connection.wait_ready(20.0)
    stream = connection.open_session(on_message=refused.put, on_lost=lambda error: None)
    stream.send(control_pb2.ClientMessage(hello=hello()))
    assert refused.get(timeout=30.0).HasField("welcome")
    before = peak_mib(small.pid)
    body = control_pb2.ReadRequest(store="nothing" + "x" * 190, timeout_s=600.0)
    for request in range(1, 20_001):
        stream.send(control_pb2.ClientMessage(request=request, read=body))
    # Half of the limit is for one session; each takes 4 KiB and a little.
    wait_for(lambda: refused.qsize() >= 20_000 - 2_048, "the refusals", timeout_s=60.0)
    assert refused.get().failure.error == "ServerBusyError"
    assert refused.qsize() < 20_000 - 1_000
    # Without a limit they take 170 MiB. Requests that are read before refusals are sent take 30 to 80 MiB.
    assert peak_mib(small.pid) - before < 2 * GROWTH_MIB
    with (
        small.client(transport="gloo") as other,
        pytest.raises(tdserve.StoreNotFoundError),
    ):
        other.from_remote_init("nothing", timeout_s=0)
    stream.close()
    connection.close()


def hello() -> control_pb2.Hello:
    """Returns the hello of a client whose messages a test writes by hand."""
    return control_pb2.Hello(protocol_version=PROTOCOL_VERSION, client_id=make_client_id(), transport="gloo")
