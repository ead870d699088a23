"""The service of three servers as one takes the exam of one server: each store lies on one of them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import tdserve
from tests.conformance.service_suite import ServiceSuite
from tests.conformance.suite import Connect


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of three live servers."""
    servers = [tdserve.Server(tmp_path_factory.mktemp(f"root{number}"), port=0) for number in range(3)]
    try:
        yield ",".join(server.start().address for server in servers)
    finally:
        for server in servers:
            server.shutdown()


class TestClusterService(ServiceSuite):
    @pytest.fixture
    def connect(self, address: str) -> Connect:
        return lambda: tdserve.connect(address, transport="gloo")

    @pytest.fixture
    def transport(self) -> str:
        return "gloo"
