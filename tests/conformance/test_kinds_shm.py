"""Every kind of tensordict through shared memory."""

from __future__ import annotations

import pytest

import tdserve
from tests.conformance.kinds_suite import KindsSuite
from tests.conformance.suite import Connect


class TestShmKinds(KindsSuite):
    @pytest.fixture
    def connect(self, server: tdserve.Server) -> Connect:
        return lambda: server.client(transport="shm")
