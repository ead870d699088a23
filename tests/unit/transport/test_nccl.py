"""What can be shown of NCCL channels without GPUs; with two of them, ``tests/conformance/test_transport_nccl.py``."""

from __future__ import annotations

import os
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue

import pytest
import torch

from tdserve.base.errors import ConnectError, NotSupportedError, PeerLostError
from tdserve.transport.ending_groups import ENDING_GROUPS
from tdserve.transport.gloo import CLIENT_RANK, WORKER_RANK, GlooChannel
from tdserve.transport.nccl import (
    CudaGpu,
    NcclWire,
    explain_unavailable,
    prepare_staging,
    read_gpu_uuid,
)
from tdserve.transport.ordered import PIECES_UNDER_WAY
from tdserve.transport.rendezvous import Branch, KVStore
from tests.gloo_secret import CREDENTIAL
from tests.kernels import Kernels, joined_wires, make_staging, make_wire
from tests.unit.transport.joined import joined_stores

TIMEOUT_S = 20.0


def test_branch_when_several_pairs_share_a_rendezvous_then_each_finds_its_own() -> None:
    stores = joined_stores()
    branches = [[Branch(store, name) for store in stores] for name in ("a", "b")]
    with ThreadPoolExecutor(4) as threads:
        forming = [
            [
                threads.submit(
                    GlooChannel, store, rank, host="127.0.0.1", credential=CREDENTIAL.narrow(str(number)), peer="it"
                )
                for store, rank in zip(pair, (WORKER_RANK, CLIENT_RANK), strict=True)
            ]
            for number, pair in enumerate(branches)
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


@pytest.mark.parametrize("device", ["cpu", "cuda:999"])
def test_gpu_uuid_when_it_cannot_be_used_then_the_error_has_the_reason(device: str) -> None:
    assert explain_unavailable(device)
    with pytest.raises(NotSupportedError) as caught:
        read_gpu_uuid(device)
    assert caught.value.reason == explain_unavailable(device)


def test_explain_unavailable_when_there_are_fewer_gpus_then_has_their_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert explain_unavailable("cuda:1") == ""
    assert explain_unavailable("cuda:2") == "there is no cuda:2: torch finds 2 CUDA devices"
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: False)
    assert "no NCCL" in explain_unavailable("cuda:1")


@pytest.mark.gpu
def test_gpu_uuid_when_asked_again_then_the_same_and_of_two_gpus_different() -> None:
    uuids = [read_gpu_uuid(f"cuda:{number}") for number in range(torch.cuda.device_count())]
    assert len(set(uuids)) == len(uuids)
    assert read_gpu_uuid("cuda:0") == uuids[0]


@pytest.mark.gpu
def test_wire_when_the_other_end_does_not_come_then_connect_error_and_the_staging_is_free_again() -> None:
    store = KVStore(lambda key, value: None)
    store.timeout_s = 0.5
    staging = prepare_staging("cuda:0", num_ready=1)
    before = staging.num_free
    with pytest.raises(ConnectError):
        NcclWire(store, CLIENT_RANK, gpu=CudaGpu(torch.device("cuda:0")), staging=staging, peer="nobody")
    assert ENDING_GROUPS.join(TIMEOUT_S)
    assert staging.num_free == before


# ---------------------------------------------------------------- a wire without a GPU


@pytest.mark.parametrize("device", ["cuda:0", "cpu"], ids=["through staging", "in place"])
def test_wire_when_pieces_move_then_they_arrive_and_both_sets_come_back(device: str) -> None:
    staging = make_staging()
    _, wires = joined_wires(staging, device)
    assert staging.num_free == 0
    for number in range(2 * PIECES_UNDER_WAY):
        sender, receiver = wires[number % 2], wires[1 - number % 2]
        sent = torch.full((1000 + number,), number, dtype=torch.uint8)
        received = torch.zeros_like(sent)
        coming = receiver.recv(received, receiver.mark_post(received))
        sender.send(sent).finish()
        coming.finish(TIMEOUT_S)
        assert torch.equal(received, sent)
    for wire in wires:
        wire.close()
        wire.close()
    assert ENDING_GROUPS.join(TIMEOUT_S)
    assert staging.num_free == 2
    with pytest.raises(PeerLostError):
        wires[0].send(torch.zeros(1, dtype=torch.uint8))


@pytest.mark.parametrize("device", ["cuda:0", "cpu"], ids=["through staging", "in place"])
def test_wire_when_the_abort_hangs_then_what_a_kernel_may_write_is_kept_until_it_returns(device: str) -> None:
    staging = make_staging()
    kernels, wires = joined_wires(staging, device)
    kernels[1].may_abort.clear()
    buried_before = ENDING_GROUPS.num_ending
    buffer = torch.zeros(1000, dtype=torch.uint8)
    is_kept = weakref.ref(buffer)
    coming = wires[1].recv(buffer, None)  # which never comes: the other end stands still
    wires[1].close()
    with pytest.raises(PeerLostError):
        coming.finish()
    wires.pop().close()
    del buffer, coming
    assert ENDING_GROUPS.num_ending == buried_before + 1
    assert staging.num_free == 0
    assert is_kept() is not None
    kernels[1].may_abort.set()
    assert ENDING_GROUPS.join(TIMEOUT_S)
    assert staging.num_free == 1
    assert is_kept() is None
    wires[0].close()
    assert ENDING_GROUPS.join(TIMEOUT_S)


def test_wire_when_it_cannot_form_then_connect_error_and_neither_thread_nor_staging_stays() -> None:
    staging = make_staging(max_sets=1)
    num_threads = len(os.listdir("/proc/self/task"))
    lonely = Kernels([SimpleQueue(), SimpleQueue()])
    with pytest.raises(ConnectError, match="no data arrived within"):
        make_wire(lonely, CLIENT_RANK, staging, timeout_s=0.1)
    failing = Kernels([SimpleQueue(), SimpleQueue()])
    failing.is_failing = True
    with pytest.raises(ConnectError, match="no group"):
        make_wire(failing, CLIENT_RANK, staging)
    assert ENDING_GROUPS.join(TIMEOUT_S)
    assert lonely.is_aborted.is_set()
    assert staging.num_free == 1
    deadline = time.monotonic() + TIMEOUT_S
    while len(os.listdir("/proc/self/task")) > num_threads:
        assert time.monotonic() < deadline


def test_wire_when_all_staging_is_in_use_then_refused_until_a_wire_is_closed() -> None:
    staging = make_staging(max_sets=2)
    _, wires = joined_wires(staging)
    with pytest.raises(ConnectError, match="sets of staging memory, of which 2 are in use"):
        make_wire(Kernels([SimpleQueue(), SimpleQueue()]), CLIENT_RANK, staging, timeout_s=0.05)
    for wire in wires:
        wire.close()
    assert ENDING_GROUPS.join(TIMEOUT_S)
    _, again = joined_wires(staging)
    for wire in again:
        wire.close()
    assert ENDING_GROUPS.join(TIMEOUT_S)
