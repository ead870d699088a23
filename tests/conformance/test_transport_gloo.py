"""gloo takes the exam of transports; and leaves torch.distributed's own world alone."""

from __future__ import annotations

import os

import pytest
import torch

from tests.channel_pairs import gloo_pair
from tests.conformance.transport_suite import Connect, TransportSuite


class TestGloo(TransportSuite):
    @pytest.fixture
    def connect(self) -> Connect:
        return gloo_pair

    def test_connect_when_done_then_the_users_world_is_untouched(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("MASTER_ADDR", "192.0.2.1")  # nobody is there: using it would fail
        monkeypatch.setenv("MASTER_PORT", "1")
        before = dict(os.environ)
        for end in gloo_pair():
            end.close()
        assert not torch.distributed.is_initialized()
        assert dict(os.environ) == before
