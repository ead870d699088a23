"""Real servers for the tests of this folder, each with processes of its own: one for the whole session, or a fresh
one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict

import tdserve
from tests.integration.forked_clients import ForkedClients, shared
from tests.processes import START_TIMEOUT_S
from tests.roots import make_quick_root
from tests.sameness import difference

FreshServer = Callable[..., tdserve.Server]
"""Starts a server: ``fresh_server()`` on a new root, ``fresh_server(root)`` on a used one."""


def example(num_rows: int = 4) -> TensorDict:
    """Returns small rows with two leaves."""
    number = torch.arange(num_rows)
    return TensorDict({"x": number[:, None] + torch.zeros(num_rows, 3), "n": {"y": number.clone()}}, [num_rows])


@pytest.fixture(scope="session")
def server() -> Iterator[tdserve.Server]:
    """A server that all tests share; each test uses store names of its own."""
    with make_quick_root() as root, tdserve.Server(root, port=0) as started:
        yield started


@pytest.fixture(scope="session", params=["gloo", "shm"])
def client(request: pytest.FixtureRequest, server: tdserve.Server) -> Iterator[tdserve.Client]:
    """A client of the shared server, over each transport."""
    with server.client(transport=request.param, timeout_s=START_TIMEOUT_S) as connected:
        connected.timeout_s = 20.0
        yield connected


@pytest.fixture(scope="session")
def sweeper(server: tdserve.Server) -> Iterator[tdserve.Client]:
    """Deletes what tests without a ``client`` leave. It has no parameters: they run once."""
    with server.client(timeout_s=START_TIMEOUT_S) as connected:
        yield connected


@pytest.fixture
def name(request: pytest.FixtureRequest) -> Iterator[str]:
    """A store name that no other test has; the store is deleted after the test."""
    own = f"{request.node.originalname}-{request.node.nodeid.encode().hex()[-16:]}-{id(request.node):x}"[-150:]
    deleter: tdserve.Client = request.getfixturevalue("client" if "client" in request.fixturenames else "sweeper")
    yield own
    if own in deleter:
        deleter.delete(own)


@pytest.fixture
def fresh_server(tmp_path: Path) -> Iterator[FreshServer]:
    """Starts servers for one test and ends them after it."""
    started: list[tdserve.Server] = []

    def start(root: Path | None = None, **settings: Any) -> tdserve.Server:
        server = tdserve.Server(root or tmp_path / f"root{len(started)}", **{"port": 0, **settings})
        started.append(server)
        return server.start()

    yield start
    for server in started:
        server.shutdown()


@pytest.fixture
def store(client: tdserve.Client, name: str) -> Iterator[Any]:
    """A store of ``example()``. It must be unchanged after the test, so that nothing bad was written and the server
    still works."""
    handle = client.memmap(example(), name)
    version = client.describe(name).version
    yield handle
    assert difference(example(), handle.to_tensordict()) is None
    assert client.describe(name).version == version


@pytest.fixture
def replay(client: tdserve.Client, name: str) -> Iterator[Any]:
    """A ring of eight with the rows of ``example()``. It must be unchanged after the test."""
    handle = client.create_replay(name, example()[0], 8)
    handle.extend(example())
    yield handle
    assert difference(example(), handle[:]) is None
    assert handle.info()["inserts"] == 4


@pytest.fixture(scope="session")
def forked_clients() -> ForkedClients:
    """Starts client processes quickly."""
    return shared()
