"""gloo takes the exam of transports; and leaves torch.distributed's own world alone."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from tdserve.transport.gloo import CLIENT_RANK, WORKER_RANK, GlooChannel
from tdserve.transport.rendezvous import KVStore
from tests.conformance.transport_suite import Connect, Ends, TransportSuite
from tests.unit.transport.bonds import BOND


def gloo_pair() -> Ends:
    """Two ends in this process; their key-value stores are joined as two processes' are by the session."""
    stores: list[KVStore] = []
    for other in (1, 0):
        stores.append(KVStore(lambda key, value, other=other: stores[other].feed(key, value)))  # type: ignore[misc]
    with ThreadPoolExecutor(2) as threads:
        ranks = (WORKER_RANK, CLIENT_RANK)
        ends = [
            threads.submit(GlooChannel, store, rank, host="127.0.0.1", bond=BOND, peer="the other end")
            for store, rank in zip(stores, ranks, strict=True)
        ]
        return ends[0].result(), ends[1].result()


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
