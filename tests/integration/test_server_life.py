"""The life of a server: it starts and prints its address, drains and ends on request, and leaves nothing behind."""

from __future__ import annotations

import os
import re
import select
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from tensordict import TensorDict

import tdserve
from tdserve.control.connection import check_health
from tdserve.server.start_lines import READY_PREFIX
from tests.integration.forked_clients import ForkedClients
from tests.processes import (
    REPOSITORY,
    START_TIMEOUT_S,
    Program,
    alarm,
    all_below,
    children_of,
    is_gone,
    state_of,
    wait_for,
    workers_of,
)

pytestmark = pytest.mark.integration

ROW = TensorDict({"x": torch.zeros(4)}, [])

WAIT_S = 10.0
"""Timeout of calls that an ending server does not wait for: the server ends in a fraction of it."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tdserve.Server]:
    """A server for the tests that do not end it."""
    with tdserve.Server(tmp_path_factory.mktemp("life"), port=0, num_workers=2) as started:
        yield started


class Foreground:
    """``tdserve serve`` in a process of its own, as a shell starts it."""

    def __init__(self, root: Path, *options: str, prefix: tuple[str, ...] = ()) -> None:
        command = [*prefix, sys.executable, "-m", "tdserve", "serve", str(root), "--port", "0", *options]
        self.process = subprocess.Popen(
            command, cwd=REPOSITORY, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
        )
        assert self.process.stdout is not None
        readable, _, _ = select.select([self.process.stdout], [], [], 60.0)
        assert readable, "no ready line in time"
        self.line = self.process.stdout.readline()
        self.address = self.line.removeprefix(READY_PREFIX).strip()

    def __enter__(self) -> Foreground:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.communicate()


def up_workers_of(pid: int) -> list[int]:
    """Returns the data workers of a server, which is ready before they are."""
    return wait_for(lambda: workers_of(pid) or None, "a data worker", timeout_s=START_TIMEOUT_S)


def in_background(call: Any) -> Future[Any]:
    """Runs a call in a thread; the future gets its result or error."""
    future: Future[Any] = Future()

    def run() -> None:
        try:
            future.set_result(call())
        except Exception as error:  # noqa: BLE001 (the future takes it)
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future


@pytest.mark.slow
def test_serve_when_it_is_up_then_prints_one_line_with_the_address_it_took(tmp_path: Path) -> None:
    with Foreground(tmp_path) as server:
        assert server.line.startswith("tdserve ready at 127.0.0.1:")
        with tdserve.connect(server.address) as client:
            assert client.stores() == []
        server.process.send_signal(signal.SIGINT)
        rest, _ = server.process.communicate(timeout=30.0)
        assert (rest, server.process.returncode) == ("", 0)


@pytest.mark.slow
def test_serve_when_it_lives_through_something_then_logs_it_with_time_and_level(tmp_path: Path) -> None:
    with Foreground(tmp_path) as server:
        (worker,) = up_workers_of(server.process.pid)
        with tdserve.connect(server.address) as client:
            os.kill(worker, signal.SIGKILL)
            wait_for(lambda: client.stats()["workers"][0]["num_restarts"] == 1, "another worker")
        server.process.send_signal(signal.SIGTERM)
        _, logged = server.process.communicate(timeout=30.0)
    lines = [re.fullmatch(r"\d{4}-\d\d-\d\d \S+ (INFO|WARNING) tdserve: (.*)", line) for line in logged.splitlines()]
    said = [(line[1], line[2]) for line in lines if line is not None]
    assert len(said) == len(lines), logged
    levels, messages = zip(*said, strict=True)
    assert levels == ("INFO", "WARNING", "INFO", "INFO")
    assert messages[0].startswith(f"serves {tmp_path} at {server.address}, version ")
    assert ", stores: 0, data workers: 1, process " in messages[0]
    assert "SIGKILL: another process killed it" in messages[1]
    assert messages[2:] == ("stops; requests under way may take another 10 s", "stopped")


@pytest.mark.slow
def test_serve_when_a_token_is_wrong_then_logs_from_where_and_never_the_token(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("right")
    with Foreground(tmp_path / "root", "--token-file", str(tmp_path / "token")) as server:
        for token in ("a-guess", None):
            with pytest.raises(tdserve.UnauthenticatedError):
                tdserve.connect(server.address, token=token, timeout_s=WAIT_S).stores()
        server.process.send_signal(signal.SIGTERM)
        _, logged = server.process.communicate(timeout=30.0)
    refused = [line for line in logged.splitlines() if " WARNING " in line]
    assert all("refused a call from ipv4:127.0.0.1:" in line for line in refused)
    assert ["its token is missing or wrong" in line for line in refused] == [True, False]
    assert ["no token was given" in line for line in refused] == [False, True]
    assert "a-guess" not in logged
    assert "right" not in logged


@pytest.mark.slow
def test_serve_when_signalled_then_waiting_calls_end_retryable_and_it_exits_zero(tmp_path: Path) -> None:
    with Foreground(tmp_path) as server, tdserve.connect(server.address, timeout_s=60.0) as client:
        replay = client.create_replay("r", like=ROW, capacity=10)
        waiting = [
            in_background(lambda: replay.sample(1, timeout_s=WAIT_S)),
            in_background(lambda: client.latest("nobody-publishes-this", timeout_s=WAIT_S)),
            in_background(lambda: client.replay("nobody-makes-this", timeout_s=WAIT_S)),
        ]
        wait_for(lambda: replay.info()["num_waiting"] == 1, "a call that waits")
        assert len(up_workers_of(server.process.pid)) == 1
        processes = all_below(server.process.pid)
        began = time.monotonic()
        server.process.send_signal(signal.SIGTERM)
        _, said = server.process.communicate(timeout=30.0)
        assert server.process.returncode == 0
        assert time.monotonic() - began < WAIT_S, "waits are cut short, not waited for"
        assert "Traceback" not in said
        for future in waiting:
            error = future.exception(timeout=30.0)
            assert isinstance(error, tdserve.TDServeError)
            assert error.retryable
        assert all(map(is_gone, processes))


@pytest.mark.slow
def test_serve_when_a_transfer_is_under_way_then_drains_first_and_a_second_signal_ends_it_at_once(
    forked_clients: ForkedClients, tmp_path: Path
) -> None:
    with Foreground(tmp_path, "--grace", "60", "--transfer-timeout", "60") as server:
        with tdserve.connect(server.address) as client:
            client.init_remote(
                TensorDict({"number": torch.zeros(16).long(), "body": torch.zeros(16, 131072).double()}, [16]), "s"
            )
        stop = {"at": 3, "signal_number": int(signal.SIGSTOP)}
        with forked_clients.start("move", server.address, "send", "s", **stop) as writer:
            writer.wait_stopped()
            server.process.send_signal(signal.SIGTERM)
            wait_for(lambda: not check_health(server.address, timeout_s=5.0), "the begin of the draining")
            asked = [sys.executable, "-m", "tdserve", "health", "--address", server.address]
            health = subprocess.run(asked, cwd=REPOSITORY, capture_output=True, text=True, timeout=30.0, check=False)
            assert (health.returncode, health.stdout) == (1, f"{server.address} NOT_SERVING\n")
            assert server.process.poll() is None
            processes = all_below(server.process.pid)
            server.process.send_signal(signal.SIGTERM)
            assert server.process.wait(30.0) == 1
            wait_for(lambda: all(map(is_gone, processes)), "the end of its data workers")


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("unshare") is None, reason="needs root and unshare")
def test_serve_when_it_is_process_one_then_signals_end_it_too(tmp_path: Path) -> None:
    prefix = ("unshare", "--pid", "--fork", "--mount-proc", "--kill-child")
    with Foreground(tmp_path, prefix=prefix) as server:

        def find_first() -> int | None:
            children = children_of(server.process.pid)
            return children[0] if len(children) == 1 else None

        first = wait_for(find_first, "the one process that unshare has forked")
        assert f"NSpid:\t{first}\t1" in Path(f"/proc/{first}/status").read_text()
        with tdserve.connect(server.address) as client:
            client.publish("p", TensorDict({"x": torch.zeros(100_000)}, []))
        os.kill(first, signal.SIGTERM)  # which by default does nothing to process one
        assert server.process.wait(30.0) == 0


@pytest.mark.slow
def test_root_when_it_is_in_use_then_refused_by_name_of_the_holder(server: tdserve.Server) -> None:
    with pytest.raises(tdserve.RootInUseError) as caught:
        tdserve.Server(server.config.root, port=0).start()
    assert str(server.pid) in caught.value.holder
    assert server.address in caught.value.holder
    command = [sys.executable, "-m", "tdserve", "serve", server.config.root, "--port", "0"]
    refused = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=60.0, check=False)
    assert refused.returncode == 1
    assert str(server.pid) in refused.stderr
    assert "Traceback" not in refused.stderr


def test_port_when_it_is_taken_then_refused_by_a_typed_error(server: tdserve.Server, tmp_path: Path) -> None:
    port = int(server.address.rpartition(":")[2])
    with pytest.raises(tdserve.InvalidRequestError, match=str(port)):
        tdserve.Server(tmp_path, port=port).start()
    tdserve.Server(tmp_path, port=0).start().shutdown()  # nothing holds the root


@pytest.mark.slow
@pytest.mark.parametrize("host", ["::1", "[::1]"])
def test_serve_when_the_address_is_of_version_6_then_clients_reach_it_there(tmp_path: Path, host: str) -> None:
    with tdserve.Server(tmp_path / "root", host=host) as server:
        assert server.address.startswith("[::1]:")
        for transport in ("gloo", "shm"):
            with server.client(transport=transport, timeout_s=20.0) as client:
                store = client.memmap(TensorDict({"x": torch.ones(100_000)}, [100_000]), transport)
                assert store["x"].sum() == 100_000


def test_health_when_it_serves_then_true_and_reflection_lists_the_service(server: tdserve.Server) -> None:
    assert check_health(server.address, timeout_s=10.0)
    with grpc.insecure_channel(server.address) as channel:
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        (answer,) = stub.ServerReflectionInfo(iter([reflection_pb2.ServerReflectionRequest(list_services="")]))
    names = {service.name for service in answer.list_services_response.service}
    assert {"tdserve.v1.ControlService", "grpc.health.v1.Health"} <= names


@pytest.mark.slow
def test_server_when_started_and_shut_down_then_its_object_has_the_state(tmp_path: Path) -> None:
    server = tdserve.Server(tmp_path, port=0)
    assert not server.is_alive
    with pytest.raises(tdserve.WrongStateError):
        _ = server.address
    assert server.start() is server
    with pytest.raises(tdserve.WrongStateError):
        server.start()
    pids = [server.pid, *all_below(server.pid)]
    with server.client() as client:
        client.create_replay("r", like=ROW, capacity=4)
    assert server.is_alive
    server.shutdown(timeout_s=30.0)
    server.shutdown()
    assert not server.is_alive
    wait_for(lambda: all(map(is_gone, pids)), "the end of its processes")  # a lent one ends a moment after its borrower
    with server as again, again.client() as client:
        assert client.stores() == ["r"]
    assert not server.is_alive


@pytest.mark.slow
def test_server_when_its_owner_is_killed_then_it_ends_too(tmp_path: Path) -> None:
    with Program("own", tmp_path) as owner:
        assert owner.line().startswith("127.0.0.1:")
        (server,) = children_of(owner.pid)
        assert len(up_workers_of(server)) == 1
        processes = all_below(server)
        owner.signal(signal.SIGKILL)
        wait_for(lambda: is_gone(server) and all(map(is_gone, processes)), "the end of the server")


@pytest.mark.full
def test_server_when_its_owner_is_killed_while_a_fork_of_it_lives_then_it_ends_too(tmp_path: Path) -> None:
    with Program("own-and-fork", tmp_path) as owner:
        address, fork = owner.line(), int(owner.line())
        try:
            (server,) = [pid for pid in children_of(owner.pid) if pid != fork]
            with tdserve.connect(address, timeout_s=20.0) as client:
                assert client.stores() == []
            owner.signal(signal.SIGKILL)
            wait_for(lambda: is_gone(server), "the end of the server")
            assert not is_gone(fork)
        finally:
            os.kill(fork, signal.SIGKILL)


@pytest.mark.slow
def test_server_when_stopped_then_calls_end_in_time_and_work_when_it_goes_on(server: tdserve.Server) -> None:
    with server.client(timeout_s=20.0) as client, server.client(timeout_s=20.0) as unconnected:
        replay = client.create_replay("stopped", like=ROW, capacity=100_000)
        late = unconnected.replay("stopped")
        batch = ROW.expand(20_000).clone()
        replay.extend(batch)
        calls = {
            "sample": lambda: replay.sample(10_000, timeout_s=0.3),
            "extend": lambda: replay.extend(batch, timeout_s=0.3),
            "small extend": lambda: replay.extend(batch[:1], timeout_s=0.3),
            "wait": lambda: client.replay("not-there", timeout_s=0.3),
            "latest": lambda: client.latest("not-there", timeout_s=0.3),
            "a first transfer": lambda: late.sample(10_000, timeout_s=0.3),
            "a fresh client": lambda: server.client(timeout_s=0.3),
        }
        os.kill(server.pid, signal.SIGSTOP)
        try:
            for name, call in calls.items():
                began = time.monotonic()
                with pytest.raises((tdserve.DeadlineExceededError, tdserve.ConnectError)):
                    call()  # type: ignore[no-untyped-call]
                assert time.monotonic() - began < 15.0, f"{name}: by its client's time, not its own"
        finally:
            os.kill(server.pid, signal.SIGCONT)
        assert len(replay.sample(10_000)) == 10_000
        before = len(replay)
        replay.extend(batch)
        assert len(replay) >= before + 20_000  # what timed out may still come


def test_wait_when_nothing_comes_then_ends_at_its_deadline_with_the_reason(server: tdserve.Server) -> None:
    with server.client() as client:
        replay = client.create_replay("empty", like=ROW, capacity=10, min_size=5)
        replay.extend(ROW.expand(3).clone())
        began = time.monotonic()
        with pytest.raises(tdserve.DeadlineExceededError, match=r"'empty'.*5"):
            replay.sample(2, timeout_s=1.0)
        assert 0.9 < time.monotonic() - began < 15.0
        with pytest.raises(tdserve.DeadlineExceededError):
            replay.sample(2, timeout_s=0)


def test_wait_when_the_store_is_deleted_then_ends_at_once(server: tdserve.Server) -> None:
    with server.client() as client, server.client() as other:
        replay = client.create_replay("doomed", like=ROW, capacity=10)
        waiting = in_background(lambda: replay.sample(1, timeout_s=30.0))
        wait_for(lambda: other.describe("doomed").num_waiting == 1, "a sampler that waits")
        other.delete("doomed")
        assert isinstance(waiting.exception(timeout=20.0), tdserve.StoreNotFoundError)


@pytest.mark.slow
def test_sessions_when_there_are_two_workers_then_they_are_spread_and_see_the_same(server: tdserve.Server) -> None:
    clients = [server.client() for _ in range(4)]
    try:
        wait_for(lambda: all(worker["is_ready"] for worker in clients[0].stats()["workers"]), "both workers")
        clients += [server.client() for _ in range(2)]
        served = [session["worker"] for session in clients[0].stats()["sessions"]]
        assert set(served) == {0, 1}
        big = TensorDict({"x": torch.arange(100_000), "who": "nobody"}, [100_000])
        clients[0].init_remote(big, "shared")
        for number, client in enumerate(clients):
            store = client["shared"]
            store.set("who", f"client {number}")
            store.set_at_("x", torch.full((50_000,), number), slice(number, number + 50_000))
            for reader in clients:
                found = reader.from_remote_init("shared")
                assert found["who"] == f"client {number}"
                assert (found["x"][number : number + 50_000] == number).all()
    finally:
        for client in clients:
            client.close()


@pytest.mark.slow
def test_batches_when_the_server_goes_away_for_good_then_the_iterator_raises(tmp_path: Path) -> None:
    with tdserve.Server(tmp_path, port=0) as server, server.client() as client:
        replay = client.create_replay("r", like=ROW, capacity=10)
        replay.extend(ROW.expand(10).clone())
        with replay.batches(4, timeout_s=5.0) as batches:
            assert len(next(batches)) == 4
            os.kill(server.pid, signal.SIGKILL)
            wait_for(lambda: state_of(server.pid) in ("Z", None), "the end of the server")
            with alarm(60.0, "the end of the batches"), pytest.raises(tdserve.TDServeError):
                for _ in batches:  # until this client notices, it draws rows without the server
                    pass


def test_future_when_its_client_is_closed_then_ends_in_closed_error(server: tdserve.Server) -> None:
    client = server.client()
    replay = client.create_replay("closing", like=ROW, capacity=100_000)
    replay.extend(ROW.expand(20_000).clone())
    os.kill(server.pid, signal.SIGSTOP)
    try:
        futures = [replay.extend(ROW.expand(20_000).clone(), return_early=True) for _ in range(3)]
        client.close()
        errors = [future.exception(timeout=30.0) for future in futures]
    finally:
        os.kill(server.pid, signal.SIGCONT)
    assert [type(error) for error in errors] == [tdserve.ClosedError] * 3
