"""Three servers, and clients of all of them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import pytest

import tdserve
from tests.integration.cluster.names import next_name
from tests.integration.crashing import Crashing


@pytest.fixture(scope="session")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[tdserve.Server]]:
    """Three live servers, by number."""
    made = [tdserve.Server(tmp_path_factory.mktemp(f"root{number}"), port=0) for number in range(3)]
    try:
        for server in made:
            server.start()
        yield made
    finally:
        for server in made:
            server.shutdown()


@pytest.fixture(scope="module")
def crashing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Crashing]]:
    """Three servers that can be killed and started again."""
    with ExitStack() as stack:
        yield [stack.enter_context(Crashing(tmp_path_factory.mktemp(f"root{number}"))) for number in range(3)]


@pytest.fixture(scope="session")
def address(servers: list[tdserve.Server]) -> str:
    """The address of all of them."""
    return ",".join(server.address for server in servers)


@pytest.fixture
def client(address: str) -> Iterator[tdserve.ClusterClient]:
    """A client of all of them, on their machine."""
    with tdserve.connect(address) as made:
        assert isinstance(made, tdserve.ClusterClient)
        yield made


@pytest.fixture
def remote_client(address: str) -> Iterator[tdserve.ClusterClient]:
    """A client of all of them, over the network."""
    with tdserve.connect(address, transport="gloo") as made:
        assert isinstance(made, tdserve.ClusterClient)
        yield made


@pytest.fixture(params=["shm", "gloo"])
def user(request: pytest.FixtureRequest, address: str) -> Iterator[tdserve.ClusterClient]:
    """A client of all servers over either transport."""
    with tdserve.connect(address, transport=request.param) as made:
        assert isinstance(made, tdserve.ClusterClient)
        yield made


@pytest.fixture
def name(address: str) -> Iterator[str]:
    """The name of a store that is deleted afterwards."""
    made = next_name()
    yield made
    with tdserve.connect(address) as client:
        if made in client:
            client.delete(made)
