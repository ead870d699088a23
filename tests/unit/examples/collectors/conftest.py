"""A server for the tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import tdserve
from tests.roots import make_quick_root


@pytest.fixture(scope="package")
def server() -> Iterator[tdserve.Server]:
    with make_quick_root() as root, tdserve.Server(root) as started:
        yield started


@pytest.fixture
def client(server: tdserve.Server) -> Iterator[tdserve.Client]:
    with server.client() as opened:
        yield opened
