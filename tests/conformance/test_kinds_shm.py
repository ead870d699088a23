"""Every kind of tensordict through shared memory; a third of them in every run, as in ``test_kinds_gloo``."""

from __future__ import annotations

from typing import ClassVar

import pytest

import tdserve
from tests.conformance.kinds_suite import KindsSuite, list_all_but
from tests.conformance.suite import Connect


class TestShmKinds(KindsSuite):
    in_full_only: ClassVar[list[str]] = list_all_but(2)

    @pytest.fixture
    def connect(self, server: tdserve.Server) -> Connect:
        return lambda: server.client(transport="shm")
