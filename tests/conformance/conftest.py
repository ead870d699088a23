"""One server for the exams of the service over every transport: it takes seconds to start."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import tdserve


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tdserve.Server]:
    """A live server."""
    with tdserve.Server(str(tmp_path_factory.mktemp("root"))).start() as made:
        yield made


@pytest.fixture(scope="session")
def channels(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tdserve.Server]:
    """A server that sends no content inside of messages."""
    with tdserve.Server(tmp_path_factory.mktemp("channels"), port=0, inline_bytes=0) as made:
        yield made
