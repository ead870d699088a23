from __future__ import annotations

import os

import pytest
import torch

from tdserve.transport import nccl_groups
from tdserve.transport.nccl_groups import abort_group, make_group, prepare_process
from tdserve.transport.rendezvous import KVStore

OURS = ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "TORCH_NCCL_ENABLE_MONITORING", "TORCH_NCCL_DUMP_ON_TIMEOUT")


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment of a process that has made no group."""
    for name in (*OURS, "TORCH_NCCL_NONBLOCKING_TIMEOUT", "NCCL_SOCKET_IFNAME", "TDSERVE_INTERFACE"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


@pytest.mark.usefixtures("environment")
def test_prepare_when_called_then_no_fault_of_a_peer_ends_the_process_and_nccl_chooses_its_interface() -> None:
    prepare_process()
    assert [os.environ[name] for name in OURS] == ["0"] * 3
    assert int(os.environ["TORCH_NCCL_NONBLOCKING_TIMEOUT"]) == nccl_groups.FORM_TIMEOUT_S
    assert "NCCL_SOCKET_IFNAME" not in os.environ


@pytest.mark.usefixtures("environment")
@pytest.mark.parametrize("interface", ["lo", "127.0.0.1"])
def test_prepare_when_an_interface_is_named_then_nccl_takes_just_that(
    monkeypatch: pytest.MonkeyPatch, interface: str
) -> None:
    monkeypatch.setenv("TDSERVE_INTERFACE", interface)
    prepare_process("")
    assert "NCCL_SOCKET_IFNAME" not in os.environ
    prepare_process()
    assert os.environ["NCCL_SOCKET_IFNAME"] == "=lo"
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "ib0")  # the user's own
    monkeypatch.setenv(OURS[0], "1")
    prepare_process(interface)
    assert os.environ["NCCL_SOCKET_IFNAME"] == "ib0"
    assert os.environ[OURS[0]] == "1"


@pytest.mark.gpu
def test_group_when_made_then_the_default_group_stays() -> None:
    group = make_group(KVStore(lambda key, value: None), 0, torch.device("cuda:0"))
    assert not torch.distributed.is_initialized()
    abort_group(group)
