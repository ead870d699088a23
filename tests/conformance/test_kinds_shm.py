"""Every kind of tensordict through shared memory."""

from __future__ import annotations

import pytest

import tdserve
from tests.conformance.kinds_suite import Connect, KindsSuite


class TestShmKinds(KindsSuite):
    @pytest.fixture
    def connect(self, server: tdserve.Server) -> Connect:
        return lambda: server.client(transport="shm")
