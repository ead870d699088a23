"""Clients that reach only the server's own port: how they find out, and what they can do."""

from __future__ import annotations

import logging
import os
import signal
import time
from collections.abc import Iterator

import pytest
import torch
from tensordict import TensorDict

import tdserve
from tests.processes import children_of, num_fds, wait_for, workers_of
from tests.recording_proxy import recording
from tests.roots import make_quick_root

NUM_NUMBERS = 2_000_000


@pytest.fixture(scope="module")
def server() -> Iterator[tdserve.Server]:
    with make_quick_root() as root, tdserve.Server(root, port=0) as made:
        yield made


@pytest.fixture
def _far_away(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes this process a client from another machine."""
    monkeypatch.setattr("tdserve.client.session.channels.hello.read_boot_id", lambda: "another machine")


def make_content() -> TensorDict:
    return TensorDict({"a": torch.arange(NUM_NUMBERS)}, [])


@pytest.mark.slow
@pytest.mark.usefixtures("_far_away")
def test_auto_when_gloo_cannot_connect_then_the_servers_port_within_seconds_and_the_reason_once(
    server: tdserve.Server, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("TDSERVE_INTERFACE", "127.0.0.1")
    # As behind a NAT: the address that this end announces is not reachable from the other end, nor the other's here.
    monkeypatch.setattr("tdserve.client.session.session.find_content_address", lambda *_: "192.0.2.1")
    with recording(server.address) as proxy, tdserve.connect(proxy.address) as client:
        begun_s = time.monotonic()
        with caplog.at_level(logging.WARNING, logger="tdserve.client"):
            client.init_remote(make_content(), "behind-a-nat")
            found = client.from_remote_init("behind-a-nat")
        assert found is not None
        assert found["a"][-1] == NUM_NUMBERS - 1
        assert time.monotonic() - begun_s < 10.0
        stats = client.stats()
        assert stats["transport"] == "grpc"
        assert stats["why_not_gloo"]
        logged = [record for record in caplog.records if "transport 'grpc'" in record.getMessage()]
        assert len(logged) == 1
        assert len(proxy.recorded) > 2 * 8 * NUM_NUMBERS
        assert proxy.num_connections == 1


@pytest.mark.slow
@pytest.mark.usefixtures("_far_away")
def test_auto_when_the_server_has_one_port_then_that_one_and_the_reason() -> None:
    with make_quick_root() as root, tdserve.Server(root, port=0, one_port=True) as made, made.client() as client:
        client.init_remote(make_content(), "content")
        stats = client.stats()
        assert stats["transport"] == "grpc"
        assert "--one-port" in stats["why_not_gloo"]
        with pytest.raises(tdserve.NotSupportedError, match=r"group 'g'.*--one-port"):
            client.group("g", world_size=2, timeout_s=5.0)
        with pytest.raises(tdserve.NotSupportedError, match=r"transport 'gloo'.*--one-port"):
            made.client(transport="gloo")


@pytest.mark.slow
def test_worker_when_killed_in_the_middle_of_content_then_the_client_goes_on_and_nothing_is_lost(
    server: tdserve.Server,
) -> None:
    row = TensorDict({"x": torch.zeros(100_000)}, [])
    with server.client(transport="grpc") as client:
        replay = client.create_replay("rows", like=row, capacity=64)
        for number in range(12):
            if number % 4 == 2:
                (worker,) = workers_of(server.pid)
                os.kill(worker, signal.SIGKILL)
            replay.extend(TensorDict({"x": torch.full((2, 100_000), float(number))}, [2]))
        stored = replay[:]["x"][:, 0]
        assert stored.tolist() == [float(number) for number in range(12) for _ in range(2)]
        client.delete("rows")


@pytest.mark.slow
def test_sessions_when_over_then_leave_no_descriptors(server: tdserve.Server) -> None:
    def exchange() -> None:
        with server.client(transport="grpc") as client:
            client.init_remote(make_content(), "passing")
            client.delete("passing")

    exchange()
    processes = [server.pid, *(worker for child in children_of(server.pid) for worker in children_of(child))]
    before = [num_fds(pid) for pid in processes]
    for _ in range(5):
        exchange()
    wait_for(lambda: [num_fds(pid) for pid in processes] <= [num + 2 for num in before], "the end of their sockets")
