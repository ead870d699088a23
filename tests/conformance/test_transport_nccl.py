"""NCCL takes the exam of transports, where there are two GPUs: two ranks may not share one."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from tdserve.transport.gloo import CLIENT_RANK, WORKER_RANK
from tdserve.transport.ordered import LARGE_BYTES, PIECE_BYTES
from tdserve.transport.rendezvous import KVStore
from tdserve.transport.session_channels import ChannelEnd, open_channel
from tests.channel_pairs import Ends
from tests.conformance.transport_suite import TIMEOUT_S, Connect, TransportSuite, content
from tests.gloo_secret import CREDENTIAL

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices: NCCL refuses two ranks on one"),
]


def nccl_pair() -> Ends:
    """Two ends in this process, on a GPU each."""
    stores: list[KVStore] = []
    for other in (1, 0):
        stores.append(KVStore(lambda key, value, other=other: stores[other].feed(key, value)))  # type: ignore[misc]
    with ThreadPoolExecutor(2) as threads:
        ends = [
            threads.submit(
                open_channel,
                "nccl",
                ChannelEnd(store, rank, "127.0.0.1", CREDENTIAL, "the other end", device=f"cuda:{rank}"),
            )
            for store, rank in zip(stores, (WORKER_RANK, CLIENT_RANK), strict=True)
        ]
        return ends[0].result(), ends[1].result()


class TestNccl(TransportSuite):
    @pytest.fixture
    def connect(self) -> Connect:
        return nccl_pair

    @pytest.fixture
    def ends(self) -> Iterator[Ends]:
        pair = nccl_pair()
        yield pair
        for end in pair:
            end.close()

    @pytest.mark.parametrize("nbytes", [100, LARGE_BYTES, 3 * PIECE_BYTES + 5])
    def test_recv_when_the_buffer_lies_on_the_gpu_then_arrives_there(self, ends: Ends, nbytes: int) -> None:
        sent = content(nbytes)
        received = torch.zeros(nbytes, dtype=torch.uint8, device=f"cuda:{CLIENT_RANK}")
        works = [ends[1].recv(received, 3), ends[0].send(sent, 3)]
        for work in works:
            work.wait(TIMEOUT_S)
        assert torch.equal(received.cpu(), sent)
