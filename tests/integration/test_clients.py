"""Clients that are closed, forked, pickled or refused, or that find no server."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import tdserve
from tdserve.client.session.catalog.catalog_client import CatalogClient
from tests.errors import raises
from tests.integration.conftest import example
from tests.sameness import difference

pytestmark = pytest.mark.integration

ROOT = Path(__file__).parents[2]


def test_transport_when_it_cannot_be_had_then_refused(server: tdserve.Server) -> None:
    with pytest.raises(tdserve.NotSupportedError, match="nccl"):
        server.client(transport="nccl")
    with pytest.raises(tdserve.InvalidRequestError, match="pigeon"):
        server.client(transport="pigeon")


def test_connect_when_no_server_runs_then_connect_error_names_the_address() -> None:
    with raises(tdserve.ConnectError, address="127.0.0.1:1"):
        tdserve.connect("127.0.0.1:1", timeout_s=0.3)
    for address in ("nonsense", "host:", ""):
        with raises(tdserve.InvalidRequestError, argument="address"):
            tdserve.connect(address, timeout_s=0.3)


def test_connect_when_the_name_does_not_resolve_then_connect_error_names_it() -> None:
    with pytest.raises(tdserve.ConnectError, match=r"'no-such-name\.invalid' does not resolve"):
        tdserve.connect("no-such-name.invalid:1", timeout_s=2.5)


@pytest.mark.parametrize("transport", ["gloo", "shm"])
def test_catalog_when_asked_over_a_session_then_the_same_answers_as_without(
    server: tdserve.Server, name: str, transport: Any
) -> None:
    with server.client(transport=transport) as client:
        client.init_remote(example(), name)
        assert client.has_session
        assert list(client) == client.stores()
        with CatalogClient(server.address) as without:
            assert client.describe(name) == without.describe(name)
            assert client.keys(name, True, sort=True) == without.keys(name, True, sort=True)
            assert client.stores(name[:3]) == without.stores(name[:3])
            for catalog in (client, without):
                assert name in catalog
                assert f"{name}?" not in catalog
                assert "missing" not in catalog
                with raises(tdserve.InvalidRequestError, argument="prefix"):
                    catalog.stores(3)  # type: ignore[arg-type]
                for ask in (catalog.keys, catalog.describe):
                    with raises(tdserve.StoreNotFoundError, name="missing"):
                        ask("missing")


def test_client_when_closed_then_every_call_raises_closed_error(server: tdserve.Server, name: str) -> None:
    client = server.client()
    store = client.memmap(example(), name)
    batches = client.create_replay(f"{name}-r"[-100:], example()[0], 4).batches(2)
    client.delete(f"{name}-r"[-100:])
    client.close()
    client.close()
    for call in (
        client.stores,
        lambda: client[name],
        lambda: store[0],
        lambda: store.__setitem__(0, example()[0]),
        lambda: client.init_remote(example(), "never"),
        lambda: client.publish("never", example()),
        lambda: client.latest("never"),
        client.stats,
    ):
        with pytest.raises(tdserve.ClosedError, match=r"client of"):
            call()
    batches.close()


def test_client_when_forked_then_the_child_gets_an_error_and_the_parent_goes_on(
    client: tdserve.Client, store: Any
) -> None:
    read_fd, write_fd = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            outcomes = []
            for call in (client.stores, lambda: client["x"], lambda: client.publish("never", example()), client.close):
                try:
                    call()
                    outcomes.append("nothing")
                except tdserve.ForkedClientError as error:
                    outcomes.append(f"pid {error.pid}")
            os.write(write_fd, ",".join(outcomes).encode())
        finally:
            os._exit(0)
    os.close(write_fd)
    with os.fdopen(read_fd) as pipe:
        assert pipe.read() == ",".join([f"pid {os.getpid()}"] * 3 + ["nothing"])
    assert os.waitpid(pid, 0)[1] == 0
    assert difference(example(), store.to_tensordict()) is None


READER = """
import pickle, sys
client = pickle.loads(sys.stdin.buffer.read())
print(client["{name}"]["x"].sum().item())
client.close()
"""


@pytest.mark.once("shm")
def test_client_when_pickled_then_works_in_another_process(client: tdserve.Client, store: Any) -> None:
    program = READER.replace("{name}", store.name)
    command = [sys.executable, "-m", "tests.lent.program", "-c", program]
    done = subprocess.run(command, cwd=ROOT, input=pickle.dumps(client), capture_output=True, check=True, timeout=60)
    assert float(done.stdout) == example()["x"].sum()


def _sum(client: tdserve.Client, name: str, answer: Any) -> None:
    answer.put(float(client[name]["x"].sum()))


@pytest.mark.slow
@pytest.mark.once("gloo")
def test_client_when_given_to_a_spawned_process_then_works_there(client: tdserve.Client, store: Any) -> None:
    context = multiprocessing.get_context("spawn")
    answer = context.Queue()
    process = context.Process(target=_sum, args=(client, store.name, answer))
    process.start()
    assert answer.get(timeout=60.0) == example()["x"].sum()
    process.join(timeout=20.0)
    assert process.exitcode == 0


UNAWAITED = """
import pickle, sys
replay = pickle.loads(sys.stdin.buffer.read())
row = replay.sample(1).select("x", "n")
futures = [replay.extend(row, return_early=True) for _ in range(200)]
"""


@pytest.mark.full
@pytest.mark.once("gloo")
def test_extends_when_not_waited_for_before_the_interpreter_ends_then_stored(client: tdserve.Client, name: str) -> None:
    replay = client.create_replay(name, example()[0], 1_000)
    replay.extend(example(1))
    command = [sys.executable, "-c", UNAWAITED]
    subprocess.run(command, cwd=ROOT, input=pickle.dumps(replay), capture_output=True, check=True, timeout=60)
    assert len(replay) == 201


WITHOUT_ROOM = """
import atexit, pickle, sys, time
from tdserve.client.session import process_exit

def report():  # runs last
    print(time.monotonic() - over_s)

atexit.register(report)
process_exit.EXIT_FLUSH_S, process_exit.EXIT_S = 4.0, 100.0
queue, row = pickle.loads(sys.stdin.buffer.read())
queue.extend(row)
future = queue.extend(row, return_early=True)
over_s = time.monotonic()
"""


@pytest.mark.full
@pytest.mark.once("gloo")
def test_exit_when_an_extend_has_no_room_then_it_is_waited_for_once(client: tdserve.Client, name: str) -> None:
    queue = client.create_queue(name, example()[0], 1)
    command = [sys.executable, "-c", WITHOUT_ROOM]
    done = subprocess.run(
        command, cwd=ROOT, input=pickle.dumps((queue, example(1))), capture_output=True, check=True, timeout=60
    )
    assert 4.0 <= float(done.stdout) < 7.0
    assert len(queue) == 1
