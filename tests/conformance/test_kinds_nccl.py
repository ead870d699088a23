"""Every kind of tensordict over NCCL, where there are two GPUs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import tdserve
from tests.conformance.kinds_suite import KindsSuite
from tests.conformance.suite import Connect

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices: NCCL refuses two ranks on one"),
]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tdserve.Server]:
    """One server for all tests of this file, on the first GPU."""
    with tdserve.Server(tmp_path_factory.mktemp("root"), devices=["cuda:0"], inline_bytes=0) as made:
        yield made


class TestNcclKinds(KindsSuite):
    @pytest.fixture
    def connect(self, server: tdserve.Server) -> Connect:
        return lambda: server.client(transport="nccl", device="cuda:1")
