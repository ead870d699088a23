"""Every kind of tensordict on three servers as one: each sixth in every run, all in a full one."""

from __future__ import annotations

from typing import ClassVar

import pytest

import tdserve
from tests.conformance.kinds_suite import KindsSuite, list_all_but
from tests.conformance.suite import Connect


class TestClusterKinds(KindsSuite):
    in_full_only: ClassVar[list[str]] = list_all_but(1, every=6)

    @pytest.fixture
    def connect(self, cluster_address: str) -> Connect:
        return lambda: tdserve.connect(cluster_address, transport="gloo")
