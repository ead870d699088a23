from __future__ import annotations

import os
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from tdserve.base.config import TRANSPORTS
from tdserve.base.errors import ConnectError, InvalidRequestError
from tdserve.rules.channel_transports import CHANNEL_TRANSPORTS
from tdserve.transport.channel import Channel
from tdserve.transport.gloo import CLIENT_RANK, WORKER_RANK, GlooChannel
from tdserve.transport.rendezvous import KVStore
from tdserve.transport.session_channels import OPENERS, ChannelEnd, open_channel
from tests.gloo_secret import CREDENTIAL
from tests.unit.transport.joined import joined_stores

TIMEOUT_S = 20.0


def open_both(stores: tuple[KVStore, KVStore], transport: str, *, device: str = "") -> tuple[Channel, Channel]:
    with ThreadPoolExecutor(2) as threads:
        ends = [
            threads.submit(
                open_channel, transport, ChannelEnd(store, rank, "127.0.0.1", CREDENTIAL, "it", device=device)
            )
            for store, rank in zip(stores, (WORKER_RANK, CLIENT_RANK), strict=True)
        ]
        return ends[0].result(), ends[1].result()


def test_openers_when_compared_with_the_names_in_the_configuration_then_all_that_use_a_channel() -> None:
    assert set(OPENERS) == set(TRANSPORTS) - {"auto", "shm"}
    assert OPENERS.keys() == CHANNEL_TRANSPORTS.keys()


def test_open_channel_when_there_is_no_such_transport_then_refused_with_those_there_are() -> None:
    with pytest.raises(InvalidRequestError) as caught:
        open_channel("pigeon", ChannelEnd(joined_stores()[0], WORKER_RANK, "127.0.0.1", CREDENTIAL, "it"))
    assert caught.value.argument == "transport"
    assert "gloo, nccl" in str(caught.value)


def test_open_channel_when_by_gloo_then_a_gloo_pair() -> None:
    ends = open_both(joined_stores(), "gloo")
    assert [type(end) for end in ends] == [GlooChannel, GlooChannel]
    for end in ends:
        end.close()


@pytest.mark.skipif(torch.cuda.is_available(), reason="is about a machine without a GPU")
def test_open_channel_when_the_gpu_cannot_be_used_then_connect_error_and_no_pair_stays() -> None:
    for end in open_both(joined_stores(), "gloo"):  # creates what remains of the first pair in a process
        end.close()
    before = len(os.listdir("/proc/self/task"))
    with pytest.raises(ConnectError, match="nccl"):
        open_both(joined_stores(), "nccl", device="cuda:0")
    deadline = time.monotonic() + TIMEOUT_S
    while len(os.listdir("/proc/self/task")) > before:  # gloo's threads end a moment later
        assert time.monotonic() < deadline
