"""Every kind of tensordict over gloo: content that rides in messages, and content that goes over the channel.

Kinds take turns: each goes one way in every run, and both ways in a full one.
"""

from __future__ import annotations

from typing import ClassVar

import pytest

import tdserve
from tests.conformance.kinds import KINDS
from tests.conformance.kinds_suite import KindsSuite
from tests.conformance.suite import Connect


class TestInlineKinds(KindsSuite):
    in_full_only: ClassVar[list[str]] = list(KINDS)[1::2]

    @pytest.fixture
    def connect(self, server: tdserve.Server) -> Connect:
        return lambda: server.client(transport="gloo")


class TestLargeKinds(KindsSuite):
    in_full_only: ClassVar[list[str]] = list(KINDS)[::2]

    @pytest.fixture
    def connect(self, channels: tdserve.Server) -> Connect:
        return lambda: channels.client(transport="gloo")
