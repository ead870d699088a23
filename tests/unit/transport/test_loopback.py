from __future__ import annotations

import pytest
import torch

from tdserve.base.errors import LocalProtocolError, PeerLostError
from tdserve.transport.loopback import LoopbackChannel


def zeros(nbytes: int) -> torch.Tensor:
    """Returns a buffer of zeros."""
    return torch.zeros(nbytes, dtype=torch.uint8)


def test_pair_when_ends_disagree_on_a_length_then_error_and_both_are_closed() -> None:
    first, second = LoopbackChannel.make_pair()
    sending = first.send(zeros(8), 3)
    with pytest.raises(LocalProtocolError, match="tag 3: 8 bytes were sent, 9 are to be received"):
        second.recv(zeros(9), 3)
    with pytest.raises(PeerLostError, match="disagree"):
        sending.wait(1.0)


def test_send_when_not_received_then_is_not_taken_and_lost_at_close() -> None:
    first, second = LoopbackChannel.make_pair()
    sending = first.send(zeros(8), 0)
    second.close()
    with pytest.raises(PeerLostError, match="end 1 of the loopback"):
        sending.wait(1.0)


def test_send_when_received_before_the_close_then_its_wait_succeeds() -> None:
    first, second = LoopbackChannel.make_pair()
    works = [first.send(zeros(8), 0), second.recv(zeros(8), 0)]
    second.close()
    for work in works:
        work.wait(0.0)


@pytest.mark.parametrize("buffer", [torch.zeros(4), zeros(8).view(2, 4), zeros(8)[::2]])
def test_send_when_buffer_is_of_another_kind_then_error(buffer: torch.Tensor) -> None:
    first, _ = LoopbackChannel.make_pair()
    with pytest.raises(LocalProtocolError, match="contiguous uint8"):
        first.send(buffer, 0)
