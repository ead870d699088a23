"""What can be shown of NCCL channels without GPUs; with two of them, ``tests/conformance/test_transport_nccl.py``."""

from __future__ import annotations

import os
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from tdserve.errors import ConnectError, NotSupportedError
from tdserve.transport.channel import Channel
from tdserve.transport.gloo import CLIENT_RANK, WORKER_RANK, GlooChannel, KVStore
from tdserve.transport.nccl import Branch, NcclWire, gpu_uuid, make_group, open_channel, why_unavailable

TIMEOUT_S = 20.0


def joined_stores() -> tuple[KVStore, KVStore]:
    """Two ends of one rendezvous."""
    stores: list[KVStore] = []
    for other in (1, 0):
        stores.append(KVStore(lambda key, value, other=other: stores[other].feed(key, value)))  # type: ignore[misc]
    return stores[0], stores[1]


def open_both(stores: tuple[KVStore, KVStore], device: str) -> tuple[Channel, Channel]:
    with ThreadPoolExecutor(2) as threads:
        ends = [
            threads.submit(open_channel, store, rank, host="127.0.0.1", device=device, peer="it")
            for store, rank in zip(stores, (WORKER_RANK, CLIENT_RANK), strict=True)
        ]
        return ends[0].result(), ends[1].result()


def test_branch_when_several_pairs_share_a_rendezvous_then_each_finds_its_own() -> None:
    stores = joined_stores()
    branches = [[Branch(store, name) for store in stores] for name in ("a", "b")]
    with ThreadPoolExecutor(4) as threads:
        forming = [
            [
                threads.submit(GlooChannel, store, rank, host="127.0.0.1", peer="it")
                for store, rank in zip(pair, (WORKER_RANK, CLIENT_RANK), strict=True)
            ]
            for pair in branches
        ]
    pairs = [[end.result() for end in pair] for pair in forming]
    for number, (first, second) in enumerate(pairs):
        received = torch.zeros(1, dtype=torch.uint8)
        works = [second.recv(received, 3), first.send(torch.tensor([number], dtype=torch.uint8), 3)]
        for work in works:
            work.wait(TIMEOUT_S)
        assert received.item() == number
        first.close()
        second.close()


def test_branch_when_the_rendezvous_is_closed_then_whoever_waits_is_told() -> None:
    store = KVStore(lambda key, value: None)
    store.close()
    with pytest.raises(ConnectError):
        Branch(store, "a").get("key")


def test_open_channel_when_no_gpu_is_named_then_gloo() -> None:
    ends = open_both(joined_stores(), "")
    assert [type(end) for end in ends] == [GlooChannel, GlooChannel]
    for end in ends:
        end.close()


@pytest.mark.skipif(torch.cuda.is_available(), reason="is about a machine without a GPU")
def test_open_channel_when_the_gpu_cannot_be_used_then_connect_error_and_no_pair_stays() -> None:
    for end in open_both(joined_stores(), ""):  # makes what the first pair of a process leaves
        end.close()
    before = len(os.listdir("/proc/self/task"))
    with pytest.raises(ConnectError, match="nccl"):
        open_both(joined_stores(), "cuda:0")
    deadline = time.monotonic() + TIMEOUT_S
    while len(os.listdir("/proc/self/task")) > before:  # gloo's threads end a moment later
        assert time.monotonic() < deadline


@pytest.mark.parametrize("device", ["cpu", "cuda:999"])
def test_gpu_uuid_when_it_cannot_be_used_then_says_why(device: str) -> None:
    assert why_unavailable(device)
    with pytest.raises(NotSupportedError) as caught:
        gpu_uuid(device)
    assert caught.value.reason == why_unavailable(device)


def test_why_unavailable_when_there_are_fewer_gpus_then_tells_how_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert why_unavailable("cuda:1") == ""
    assert why_unavailable("cuda:2") == "there is no cuda:2: torch finds 2 CUDA devices"
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: False)
    assert "no NCCL" in why_unavailable("cuda:1")


@pytest.mark.gpu
def test_gpu_uuid_when_asked_again_then_the_same_and_of_two_gpus_different() -> None:
    uuids = [gpu_uuid(f"cuda:{number}") for number in range(torch.cuda.device_count())]
    assert len(set(uuids)) == len(uuids)
    assert gpu_uuid("cuda:0") == uuids[0]


@pytest.mark.gpu
def test_group_when_made_then_environment_and_default_group_stay() -> None:
    before = dict(os.environ)
    group = make_group(KVStore(lambda key, value: None), 0, torch.device("cuda:0"))
    assert dict(os.environ) == before
    assert not torch.distributed.is_initialized()
    group.abort()


@pytest.mark.gpu
def test_wire_when_the_other_end_does_not_come_then_connect_error() -> None:
    store = KVStore(lambda key, value: None)
    store.timeout_s = 0.5
    with pytest.raises(ConnectError):
        NcclWire(store, CLIENT_RANK, device=torch.device("cuda:0"), peer="nobody")
