"""Streams of content at the server's port: who may open one, and what a client that breaks the rules can do."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from contextlib import suppress
from threading import Thread

import pytest
import torch
from tensordict import TensorDict

import tdserve
from tdserve.base.errors import PeerLostError
from tdserve.client.client import Client
from tdserve.control.connection import ControlConnection
from tests.processes import wait_for, workers_of
from tests.roots import make_quick_root

SECRET = bytes(32)
FRAME = struct.Struct("<BIQ")
GREETING = FRAME.pack(0, 0x7464_7365, 0)
MAX_GROWTH_BYTES = 32 << 20
"""Far more than control and a worker keep of one stream: 1 MiB, and the buffers of their sockets."""


@pytest.fixture(scope="module")
def server() -> Iterator[tdserve.Server]:
    with make_quick_root() as root, tdserve.Server(root, port=0) as made:
        yield made


@pytest.fixture
def connection(server: tdserve.Server) -> Iterator[ControlConnection]:
    made = ControlConnection(server.address)
    yield made
    made.close()


@pytest.fixture
def client(server: tdserve.Server) -> Iterator[Client]:
    with server.client(transport="grpc") as made:
        yield made
        for name in made.stores():
            made.delete(name)


def read_resident(pid: int) -> int:
    with open(f"/proc/{pid}/statm") as file:
        return int(file.read().split()[1]) * 4096


def test_stream_when_its_session_or_secret_is_another_then_refused(
    connection: ControlConnection, client: Client
) -> None:
    number = client.session(client.make_deadline(None)).welcome.session
    for session in (number, 1):
        stream = connection.open_content(session, 0, SECRET)
        with pytest.raises(PeerLostError, match="has ended, or its secret is another"):
            stream.read_into(memoryview(bytearray(1)))
        stream.close()


def test_stream_when_the_channel_has_one_then_refused_and_the_first_goes_on(
    connection: ControlConnection, client: Client
) -> None:
    content = TensorDict({"a": torch.arange(100_000)}, [])
    client.init_remote(content, "content")
    welcome = client.session(client.make_deadline(None)).welcome
    stream = connection.open_content(welcome.session, 0, welcome.secret)
    with pytest.raises(PeerLostError, match=r"channel 0 .* is gone"):
        stream.read_into(memoryview(bytearray(1)))
    stream.close()
    found = client.from_remote_init("content")
    assert found is not None
    assert torch.equal(found["a"], content["a"])


@pytest.mark.parametrize("is_greeted", [True, False])
def test_stream_when_it_floods_then_ends_and_no_process_grows(
    server: tdserve.Server, connection: ControlConnection, client: Client, is_greeted: bool
) -> None:
    welcome = client.session(client.make_deadline(None)).welcome
    processes = [server.pid, *workers_of(server.pid)]
    before = [read_resident(pid) for pid in processes]
    stream = connection.open_content(welcome.session, 0, welcome.secret)
    flood = memoryview((GREETING if is_greeted else b"") + FRAME.pack(2, 1, 1 << 40))

    def write() -> None:
        with suppress(PeerLostError):
            stream.write([flood])
            while True:
                stream.write([memoryview(bytes(1 << 20))])

    writing = Thread(target=write)
    writing.start()
    with pytest.raises(PeerLostError):
        stream.read_into(memoryview(bytearray(1 << 20)))  # until the worker closes its end
    stream.close()
    writing.join()
    for pid, resident in zip(processes, before, strict=True):
        assert read_resident(pid) - resident < MAX_GROWTH_BYTES
    client.init_remote(TensorDict({"a": torch.arange(100_000)}, []), f"after-{is_greeted}")


@pytest.mark.slow
def test_client_when_it_reads_nothing_then_no_process_grows_and_others_go_on(
    server: tdserve.Server, client: Client
) -> None:
    content = TensorDict({"a": torch.zeros(256 << 20, dtype=torch.uint8)}, [])
    client.init_remote(content, "large")
    greedy = server.client(transport="grpc", timeout_s=60.0)
    welcome = greedy.session(greedy.make_deadline(None)).welcome
    raw = ControlConnection(server.address)
    stream = raw.open_content(welcome.session, 0, welcome.secret)
    control, before = server.pid, read_resident(server.pid)
    stream.write([memoryview(GREETING + FRAME.pack(1, 7, 256 << 20))])  # awaits what it never reads
    replay = client.create_replay("rows", like=TensorDict({"x": torch.zeros(20_000)}, []), capacity=8)
    for _ in range(5):
        replay.extend(TensorDict({"x": torch.ones(2, 20_000)}, [2]))
        assert replay.sample(4)["x"].sum() == 80_000
    assert read_resident(control) - before < MAX_GROWTH_BYTES
    stream.close()
    raw.close()
    greedy.close()
    wait_for(lambda: len(client.stats()["sessions"]) <= 1, "the end of the greedy session")
