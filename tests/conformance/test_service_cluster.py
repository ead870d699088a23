"""The service of three servers as one takes the exam of one server: each store lies on one of them."""

from __future__ import annotations

import pytest

import tdserve
from tests.conformance.service_suite import ServiceSuite
from tests.conformance.suite import Connect


class TestClusterService(ServiceSuite):
    @pytest.fixture
    def connect(self, cluster_address: str) -> Connect:
        return lambda: tdserve.connect(cluster_address, transport="gloo")

    @pytest.fixture
    def transport(self) -> str:
        return "gloo"
