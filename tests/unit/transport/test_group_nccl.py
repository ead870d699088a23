from __future__ import annotations

import pytest
import torch

from tdserve.base.errors import DeadlineExceededError, NotSupportedError, PeerLostError
from tdserve.transport.group_nccl import NcclLink, check_available
from tdserve.transport.rendezvous import KVStore


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_check_when_there_is_no_gpu_then_not_supported() -> None:
    with pytest.raises(NotSupportedError, match="nccl"):
        check_available()


@pytest.mark.gpu
def test_link_when_of_one_rank_then_moves_and_reduces_and_is_closed() -> None:
    device = torch.device("cuda", 0)
    link = NcclLink(KVStore(lambda key, value: None), 0, 1, device=device, name="g")
    flat = torch.arange(10.0, device=device)
    link.broadcast([flat], 0, 30.0)
    link.all_reduce([flat], "max", 30.0)
    assert torch.equal(flat.cpu(), torch.arange(10.0))
    link.close()
    link.close()
    link.join(30.0)
    with pytest.raises(PeerLostError):
        link.broadcast([flat], 0, 1.0)


@pytest.mark.gpu
def test_broadcast_when_the_other_rank_never_comes_then_deadline() -> None:
    device = torch.device("cuda", 0)
    link = NcclLink(KVStore(lambda key, value: None), 0, 2, device=device, name="g")
    with pytest.raises(DeadlineExceededError):
        link.broadcast([torch.zeros(10, device=device)], 0, 1.0)
    link.join(30.0)
