from __future__ import annotations

import struct

import pytest
import torch

from tdserve.base.errors import RemoteProtocolError
from tdserve.client.groups.agreement import PAGE_BYTES, post_note, recv_notes
from tdserve.transport.group_content import CallChannel
from tests.unit.transport.group_channels import open_channels

SIZES = (0, 1, PAGE_BYTES - 9, PAGE_BYTES - 8, PAGE_BYTES - 7, 100_000)


def test_notes_when_of_any_length_then_they_arrive_in_the_order_of_the_ranks() -> None:
    def exchange(channel: CallChannel) -> list[bytes]:
        found = []
        for nbytes in SIZES:
            if channel.rank == 0:
                found += recv_notes(channel, [2, 1])
            else:
                recv_notes(channel, [], post_note(channel, bytes([channel.rank]) * nbytes, [0]))
        return found

    with open_channels(3) as channels:
        expected = [bytes([rank]) * nbytes for nbytes in SIZES for rank in (2, 1)]
        assert channels.each(exchange) == [expected, [], []]


def test_note_when_its_length_is_absurd_then_remote_protocol_error() -> None:
    def exchange(channel: CallChannel) -> None:
        if channel.rank == 0:
            with pytest.raises(RemoteProtocolError):
                recv_notes(channel, [1])
        else:
            page = struct.pack("<Q", 1 << 60).ljust(PAGE_BYTES, b"\0")
            channel.wait([channel.post(torch.frombuffer(bytearray(page), dtype=torch.uint8), 0)])

    with open_channels(2) as channels:
        channels.each(exchange)
