"""Every kind of tensordict over gloo."""

from __future__ import annotations

import pytest

import tdserve
from tests.conformance.kinds_suite import Connect, KindsSuite


class TestGlooKinds(KindsSuite):
    @pytest.fixture
    def connect(self, server: tdserve.Server) -> Connect:
        return lambda: server.client(transport="gloo")
