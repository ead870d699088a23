"""Keyed stores on three servers as one take their exam."""

from __future__ import annotations

import pytest

import tdserve
from tests.conformance.keyed_life_suite import KeyedLifeSuite
from tests.conformance.suite import Connect


class TestClusterKeyed(KeyedLifeSuite):
    @pytest.fixture
    def connect(self, cluster_address: str) -> Connect:
        return lambda: tdserve.connect(cluster_address, transport="gloo")
