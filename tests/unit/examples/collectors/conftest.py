"""A server for the tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import tdserve


@pytest.fixture(scope="package")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tdserve.Server]:
    with tdserve.Server(tmp_path_factory.mktemp("root")) as started:
        yield started


@pytest.fixture
def client(server: tdserve.Server) -> Iterator[tdserve.Client]:
    with server.client() as opened:
        yield opened
