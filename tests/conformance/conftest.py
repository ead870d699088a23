"""One server for the exams of the service over every transport: it takes seconds to start."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import pytest

import tdserve
from tests.roots import make_quick_root


@pytest.fixture(scope="session")
def server() -> Iterator[tdserve.Server]:
    """A live server."""
    with make_quick_root() as root, tdserve.Server(root) as made:
        yield made


@pytest.fixture(scope="session")
def channels() -> Iterator[tdserve.Server]:
    """A server that sends no content inside of messages."""
    with make_quick_root() as root, tdserve.Server(root, port=0, inline_bytes=0) as made:
        yield made


@pytest.fixture(scope="session")
def cluster_address() -> Iterator[str]:
    """The address of three live servers."""
    with ExitStack() as stack:
        servers = [stack.enter_context(tdserve.Server(stack.enter_context(make_quick_root()))) for _ in range(3)]
        yield ",".join(server.address for server in servers)
