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
