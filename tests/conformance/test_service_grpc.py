"""The service over the client's connection to the control process takes its exam."""

from __future__ import annotations

import pytest

import tdserve
from tests.conformance.service_suite import ServiceSuite
from tests.conformance.suite import Connect


class TestGrpcService(ServiceSuite):
    @pytest.fixture
    def connect(self, server: tdserve.Server) -> Connect:
        return lambda: server.client(transport="grpc")

    @pytest.fixture
    def transport(self) -> str:
        return "grpc"


class TestGrpcServiceWithoutInlineContent(TestGrpcService):
    @pytest.fixture
    def connect(self, channels: tdserve.Server) -> Connect:
        return lambda: channels.client(transport="grpc")
