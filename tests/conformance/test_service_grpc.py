"""The service over the client's connection to the control process takes its exam."""

from __future__ import annotations

import pytest

import tdserve
from tests.conformance.service_suite import ServiceSuite
from tests.conformance.suite import Connect


class TestGrpcServiceWithoutInlineContent(ServiceSuite):
    @pytest.fixture
    def connect(self, channels: tdserve.Server) -> Connect:
        return lambda: channels.client(transport="grpc")

    @pytest.fixture
    def transport(self) -> str:
        return "grpc"


@pytest.mark.full  # what rides in messages takes the way that it takes with gloo where there is no mail
class TestGrpcService(TestGrpcServiceWithoutInlineContent):
    @pytest.fixture
    def connect(self, server: tdserve.Server) -> Connect:
        return lambda: server.client(transport="grpc")
