"""A live server for the commands of a module, and a shell that reaches it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import tdserve
from tests.integration.shell import Shell
from tests.roots import make_quick_root


@pytest.fixture(scope="module")
def server() -> Iterator[tdserve.Server]:
    """A live server."""
    with make_quick_root() as root, tdserve.Server(root, port=0) as made:
        yield made


@pytest.fixture
def client(server: tdserve.Server) -> Iterator[tdserve.Client]:
    """A client of it, whose stores are deleted afterwards."""
    with tdserve.connect(server.address) as made:
        yield made
        for name in made.stores():
            made.delete(name)


@pytest.fixture
def shell(server: tdserve.Server, capsys: pytest.CaptureFixture[str]) -> Shell:
    """A shell whose commands reach it."""
    return Shell(server.address, capsys)
