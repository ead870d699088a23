"""The keyed suites over gloo."""

from __future__ import annotations

import pytest

import tdserve
from tests.conformance.keyed_life_suite import KeyedLifeSuite
from tests.conformance.suite import Connect


class TestGlooKeyed(KeyedLifeSuite):
    @pytest.fixture
    def connect(self, server: tdserve.Server) -> Connect:
        return lambda: server.client(transport="gloo")
