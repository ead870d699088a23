"""The service over NCCL takes its exam, where there are two GPUs; with one, it says why it does not use NCCL."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tensordict import TensorDict

import tdserve
from tests.conformance.service_suite import ServiceSuite
from tests.conformance.suite import Connect

pytestmark = pytest.mark.gpu

needs_two = pytest.mark.skipif(
    torch.cuda.device_count() < 2, reason="needs two CUDA devices: NCCL refuses two ranks on one"
)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tdserve.Server]:
    """One server for all tests of this file, on the first GPU."""
    with tdserve.Server(tmp_path_factory.mktemp("root"), devices=["cuda:0"]) as made:
        yield made


@needs_two
class TestNcclService(ServiceSuite):
    @pytest.fixture
    def connect(self, server: tdserve.Server) -> Connect:
        return lambda: server.client(transport="nccl", device="cuda:1")

    @pytest.fixture
    def transport(self) -> str:
        return "nccl"


@needs_two
def test_reads_when_for_the_clients_gpu_then_arrive_on_it(server: tdserve.Server) -> None:
    content = TensorDict({"large": torch.arange(3_000_000), "small": torch.arange(5)}, [])
    row = TensorDict({"x": torch.zeros(1000), "number": torch.tensor(0)})
    rows = TensorDict({"x": torch.arange(512.0)[:, None].repeat(1, 1000), "number": torch.arange(512)}, [512])
    with server.client(transport="nccl", device="cuda:1") as client:
        assert client.stats()["transport"] == "nccl"
        client.init_remote(content, "content")
        client.publish("weights", content)
        replay = client.create_replay("rows", like=row, capacity=512)
        replay.extend(rows)
        weights = client.latest("weights", device="cuda:1")
        assert weights is not None
        for found in (client.from_remote_init("content", device="cuda:1"), weights.data):
            assert found.device == torch.device("cuda:1")
            assert bool((found.cpu() == content).all())
        batch = replay.sample(512, device="cuda:1")
        assert batch.device == torch.device("cuda:1")
        assert torch.equal(batch["x"][:, -1], batch["number"].float())


def test_connect_when_both_ends_share_a_gpu_then_error_before_nccl_is_touched(server: tdserve.Server) -> None:
    with pytest.raises(tdserve.NcclUnavailableError, match="both ends use one GPU"):
        server.client(transport="nccl", device="cuda:0")
    with server.client(device="cuda:0") as client:
        stats = client.stats()
        assert stats["transport"] == "shm"
        assert "both ends use one GPU" in stats["why_not_nccl"]
        client.init_remote(TensorDict({"a": torch.arange(5, device="cuda:0")}, []), "shared")
        assert client.from_remote_init("shared", device="cuda:0")["a"].tolist() == [0, 1, 2, 3, 4]


def test_serve_when_a_gpu_is_missing_then_serves_without_nccl(tmp_path: Path) -> None:
    with tdserve.Server(tmp_path / "root", devices=["cuda:999"]) as server:
        with pytest.raises(tdserve.NcclUnavailableError, match="there is no cuda:999"):
            server.client(transport="nccl", device="cuda:0")
        with server.client() as client:
            assert client.stores() == []
