"""Every kind of tensordict over gRPC, as content that goes over the channel; what rides in messages is as with gloo."""

from __future__ import annotations

from typing import ClassVar

import pytest

import tdserve
from tests.conformance.kinds_suite import KindsSuite, list_all_but
from tests.conformance.suite import Connect


class TestGrpcKinds(KindsSuite):
    in_full_only: ClassVar[list[str]] = list_all_but(2, every=6)

    @pytest.fixture
    def connect(self, channels: tdserve.Server) -> Connect:
        return lambda: channels.client(transport="grpc")
