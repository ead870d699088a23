from __future__ import annotations

from typing import Any

import pytest
import torch

from tdserve.base.errors import InvalidRequestError, NcclUnavailableError, NotSupportedError
from tdserve.client.content import gpu as under_test
from tdserve.client.content.gpu import NO_GPU, Gpu, check_channel, find_gpu, find_landing_device
from tdserve.v1 import control_pb2

MINE = Gpu("cuda:1", "mine")


@pytest.fixture
def _one_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes torch report one GPU."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)


def test_find_gpu_when_none_is_named_then_none() -> None:
    for transport in ("auto", "gloo", "shm"):
        assert find_gpu(None, transport=transport) == NO_GPU


@pytest.mark.parametrize("transport", ["auto", "nccl"])
def test_find_gpu_when_it_is_none_then_refused(transport: str) -> None:
    with pytest.raises(InvalidRequestError, match="'cpu' is not a CUDA device"):
        find_gpu("cpu", transport=transport)


@pytest.mark.skipif(torch.cuda.is_available(), reason="is about a machine without a GPU")
def test_find_gpu_when_the_machine_has_none_then_refused() -> None:
    with pytest.raises(NotSupportedError, match="0 CUDA devices"):
        find_gpu("cuda:0", transport="auto")
    with pytest.raises(NotSupportedError, match="transport 'nccl'"):
        find_gpu(None, transport="nccl")


@pytest.mark.usefixtures("_one_gpu")
@pytest.mark.parametrize("device", ["cuda", "cuda:0", 0, torch.device("cuda", 0)])
def test_find_gpu_when_there_is_one_then_has_its_number_and_uuid(monkeypatch: pytest.MonkeyPatch, device: Any) -> None:
    monkeypatch.setattr(under_test, "read_gpu_uuid", lambda device: f"uuid of {device}")
    assert find_gpu(device, transport="auto") == Gpu("cuda:0", "uuid of cuda:0")
    assert find_gpu(None, transport="nccl") == Gpu("cuda:0", "uuid of cuda:0")


@pytest.mark.usefixtures("_one_gpu")
def test_find_gpu_when_torch_has_no_nccl_then_gives_the_reason_or_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: False)
    assert find_gpu("cuda:0", transport="auto") == Gpu("cuda:0", "", "torch has no NCCL here")
    assert find_gpu("cuda:0", transport="gloo") == Gpu("cuda:0", "", "'gloo' was asked for")
    with pytest.raises(NotSupportedError, match="no NCCL"):
        find_gpu("cuda:0", transport="nccl")


def test_check_channel_when_the_server_grants_nccl_then_taken() -> None:
    welcome = control_pb2.Welcome(transport="nccl", gpu="another")
    assert check_channel(welcome, MINE, transport="auto", address="a:1") == ("nccl", "")


def test_check_channel_when_the_server_refuses_then_its_reason() -> None:
    welcome = control_pb2.Welcome(transport="gloo", why_not="told")
    assert check_channel(welcome, MINE, transport="auto", address="a:1") == ("gloo", "told")
    with pytest.raises(NcclUnavailableError, match="told"):
        check_channel(welcome, MINE, transport="nccl", address="a:1")


def test_check_channel_when_the_server_overlooks_that_the_gpu_is_shared_then_not_touched() -> None:
    welcome = control_pb2.Welcome(transport="nccl", gpu="mine")
    transport, why_not = check_channel(welcome, MINE, transport="auto", address="a:1")
    assert transport == "gloo"
    assert "both ends use one GPU" in why_not
    with pytest.raises(NcclUnavailableError, match="one GPU"):
        check_channel(welcome, MINE, transport="nccl", address="a:1")


def test_check_channel_when_the_server_is_older_then_another_transport_or_refused() -> None:
    welcome = control_pb2.Welcome(transport="gloo")
    assert check_channel(welcome, NO_GPU, transport="auto", address="a:1") == ("gloo", "")
    with pytest.raises(NcclUnavailableError) as caught:
        check_channel(welcome, MINE, transport="nccl", address="a:1")
    assert not caught.value.retryable


def test_landing_when_content_is_for_the_sessions_gpu_then_there_else_on_the_cpu() -> None:
    assert find_landing_device("cpu", "cpu") == torch.device("cpu")  # any device serves to compare names
    assert find_landing_device("cuda:1", "cpu") is None
    assert find_landing_device("cuda:1", None) is None
    assert find_landing_device("", "cpu") is None
