"""Every kind of tensordict over gloo: content that rides in messages, and content that goes over the channel."""

from __future__ import annotations

import pytest

import tdserve
from tests.conformance.kinds_suite import KindsSuite
from tests.conformance.suite import Connect


class TestInlineKinds(KindsSuite):
    @pytest.fixture
    def connect(self, server: tdserve.Server) -> Connect:
        return lambda: server.client(transport="gloo")


class TestLargeKinds(KindsSuite):
    @pytest.fixture
    def connect(self, channels: tdserve.Server) -> Connect:
        return lambda: channels.client(transport="gloo")
