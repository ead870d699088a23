"""One server for all tests of the client: it takes seconds to start."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest

import tdserve
from tdserve.base.deadline import Deadline
from tdserve.base.errors import StoreNotFoundError
from tdserve.client.session.session import Session
from tdserve.v1 import control_pb2
from tests.processes import wait_for
from tests.roots import make_quick_root
from tests.unit.client.three_rows import local

_numbers = itertools.count()


@pytest.fixture(scope="session")
def server() -> Iterator[tdserve.Server]:
    """A live server, which does not wait at its end for calls that tests have left unfinished."""
    with make_quick_root() as root, tdserve.Server(root, grace_s=1.0) as made:
        yield made


@pytest.fixture(params=["shm", "gloo"])
def client(server: tdserve.Server, request: pytest.FixtureRequest) -> Iterator[tdserve.Client]:
    """A client of it, over either transport."""
    with server.client(transport=request.param, timeout_s=20.0) as made:
        yield made


@pytest.fixture
def local_client(server: tdserve.Server) -> Iterator[tdserve.Client]:
    """A client that reads and writes the files by itself."""
    with server.client(transport="shm", timeout_s=20.0) as made:
        yield made


@pytest.fixture
def remote_client(server: tdserve.Server) -> Iterator[tdserve.Client]:
    """A client whose content takes the network."""
    with server.client(transport="gloo", timeout_s=20.0) as made:
        yield made


@pytest.fixture
def name() -> str:
    """A name that no store has."""
    return f"store-{next(_numbers)}"


@pytest.fixture
def handle(client: tdserve.Client, name: str) -> tdserve.StoreHandle:
    """A store of three rows for each test, filled with ``three_rows.local()``."""
    made: tdserve.StoreHandle = client.memmap(local(), name)
    return made


@pytest.fixture
def mailing(remote_client: tdserve.Client) -> Session:
    """A session whose control channel is open."""
    session = remote_client.session(Deadline.after(20.0))

    def is_mailed() -> bool:
        asked = control_pb2.ReadRequest(store="no such store", fingerprint=b"known")
        pending = session.send(number := remote_client.requests.take_number(), read=asked)
        with pytest.raises(StoreNotFoundError):
            pending.wait(20.0, "an answer")
        session.end_request(number)
        return pending.is_mailed

    wait_for(is_mailed, "the opening of the control channel")
    return session
