from __future__ import annotations

import pytest
import torch

from tdserve.base.errors import DeadlineExceededError, NotSupportedError, PeerLostError
from tdserve.transport.group_nccl import NcclGroupChannel, check_available
from tdserve.transport.rendezvous import KVStore


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_check_when_there_is_no_gpu_then_not_supported() -> None:
    with pytest.raises(NotSupportedError, match="nccl"):
        check_available()


@pytest.mark.gpu
def test_channel_when_of_one_rank_then_moves_and_reduces_and_is_closed() -> None:
    device = torch.device("cuda", 0)
    channel = NcclGroupChannel(KVStore(lambda key, value: None), 0, 1, device=device, name="g")
    flat = torch.arange(10.0, device=device)
    channel.broadcast([flat], 0, 30.0)
    channel.all_reduce([flat], "max", 30.0)
    assert torch.equal(flat.cpu(), torch.arange(10.0))
    channel.close()
    channel.close()
    channel.join(30.0)
    with pytest.raises(PeerLostError):
        channel.broadcast([flat], 0, 1.0)


@pytest.mark.gpu
def test_broadcast_when_the_other_rank_never_comes_then_deadline() -> None:
    device = torch.device("cuda", 0)
    channel = NcclGroupChannel(KVStore(lambda key, value: None), 0, 2, device=device, name="g")
    with pytest.raises(DeadlineExceededError):
        channel.broadcast([torch.zeros(10, device=device)], 0, 1.0)
    channel.join(30.0)
