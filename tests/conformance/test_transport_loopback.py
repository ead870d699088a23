"""The loopback takes the exam of transports."""

from __future__ import annotations

import pytest

from tdserve.transport.loopback import LoopbackChannel
from tests.conformance.transport_suite import Connect, TransportSuite


class TestLoopback(TransportSuite):
    @pytest.fixture
    def connect(self) -> Connect:
        return LoopbackChannel.make_pair
