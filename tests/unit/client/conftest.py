"""One server for all tests of the client: it takes seconds to start."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest

import tdserve

_numbers = itertools.count()


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tdserve.Server]:
    """A live server."""
    with tdserve.Server(str(tmp_path_factory.mktemp("root"))).start() as made:
        yield made


@pytest.fixture
def client(server: tdserve.Server) -> Iterator[tdserve.Client]:
    """A client of it."""
    with server.client(timeout_s=20.0) as made:
        yield made


@pytest.fixture
def name() -> str:
    """Of a store that nobody has."""
    return f"store-{next(_numbers)}"
