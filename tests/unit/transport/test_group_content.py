from __future__ import annotations

from functools import partial

import pytest
import torch

from tdserve.base.errors import DeadlineExceededError, PeerLostError
from tdserve.messages.layout import Message
from tdserve.transport.group_content import CallChannel, recv_content, send_content
from tdserve.transport.sources_sinks import FlatBuffer
from tests.unit.transport.group_channels import open_channels

MESSAGES = tuple(Message(offset, 1 << 18, ()) for offset in range(0, 1 << 23, 1 << 18))
"""32 messages: more than may be under way at once."""


def numbers() -> torch.Tensor:
    return torch.arange(1 << 20).view(torch.uint8)


class Staged(FlatBuffer):
    """A flat buffer that nothing is received into directly."""

    def find_memory(self, message: Message) -> None:  # type: ignore[override]
        return None

    def drain(self, message: Message, staging: torch.Tensor) -> None:
        super().find_memory(message).copy_(staging)


@pytest.mark.slow
@pytest.mark.parametrize("end", [FlatBuffer, Staged])
@pytest.mark.parametrize("onward", [{0: [1], 1: [2], 2: [3]}, {0: [1, 2], 1: [3]}])
def test_content_when_passed_on_then_every_rank_has_all_of_it(
    end: type[FlatBuffer], onward: dict[int, list[int]]
) -> None:
    parents = {child: parent for parent, children in onward.items() for child in children}

    def move(channel: CallChannel) -> torch.Tensor:
        rank = channel.rank
        if rank == 0:
            send_content(channel, MESSAGES, FlatBuffer(numbers()), onward[0])
            return numbers()
        into = torch.zeros(1 << 23, dtype=torch.uint8)
        recv_content(channel, MESSAGES, end(into), parents[rank], onward.get(rank, ()))
        return into

    with open_channels(4) as channels:
        for found in channels.each(move):
            assert torch.equal(found, numbers())


def test_content_when_a_rank_in_the_middle_goes_then_those_before_and_behind_it_raise() -> None:
    def move(channel: CallChannel) -> None:
        rank = channel.rank
        if rank == 1:
            recv_content(channel, MESSAGES[:3], FlatBuffer(torch.zeros(1 << 23, dtype=torch.uint8)), 0, [2])
            channel.group.close()
            return
        part = partial(send_content, channel, MESSAGES * 8, FlatBuffer(numbers()), [1])
        if rank == 2:
            part = partial(recv_content, channel, MESSAGES, FlatBuffer(torch.zeros(1 << 23, dtype=torch.uint8)), 1)
        with pytest.raises((PeerLostError, DeadlineExceededError)):
            part()

    with open_channels(3) as channels:
        channels.each(move)
