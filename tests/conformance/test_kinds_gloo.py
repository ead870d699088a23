"""Every kind of tensordict over gloo: content that rides in messages, and content that goes over the channel.

Kinds take turns with those of shared memory: each goes one way in every run, and all three ways in a full one.
"""

from __future__ import annotations

from typing import ClassVar

import pytest

import tdserve
from tests.conformance.kinds_suite import KindsSuite, list_all_but
from tests.conformance.suite import Connect


class TestInlineKinds(KindsSuite):
    in_full_only: ClassVar[list[str]] = list_all_but(0)

    @pytest.fixture
    def connect(self, server: tdserve.Server) -> Connect:
        return lambda: server.client(transport="gloo")


class TestLargeKinds(KindsSuite):
    in_full_only: ClassVar[list[str]] = list_all_but(1)

    @pytest.fixture
    def connect(self, channels: tdserve.Server) -> Connect:
        return lambda: channels.client(transport="gloo")
