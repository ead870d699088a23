from __future__ import annotations

import struct

import pytest
import torch

from tdserve.base.errors import RemoteProtocolError
from tdserve.client.groups.agreement import PAGE_BYTES, post_note, recv_notes
from tdserve.transport.group_content import GroupWire
from tests.unit.transport.links import linked

SIZES = (0, 1, PAGE_BYTES - 9, PAGE_BYTES - 8, PAGE_BYTES - 7, 100_000)


def test_notes_when_of_any_length_then_they_arrive_in_the_order_of_the_ranks() -> None:
    def exchange(wire: GroupWire) -> list[bytes]:
        found = []
        for nbytes in SIZES:
            if wire.link.rank == 0:
                found += recv_notes(wire, [2, 1])
            else:
                recv_notes(wire, [], post_note(wire, bytes([wire.link.rank]) * nbytes, [0]))
        return found

    with linked(3) as links:
        expected = [bytes([rank]) * nbytes for nbytes in SIZES for rank in (2, 1)]
        assert links.each(exchange) == [expected, [], []]


def test_note_when_its_length_is_absurd_then_remote_protocol_error() -> None:
    def exchange(wire: GroupWire) -> None:
        if wire.link.rank == 0:
            with pytest.raises(RemoteProtocolError):
                recv_notes(wire, [1])
        else:
            page = struct.pack("<Q", 1 << 60).ljust(PAGE_BYTES, b"\0")
            wire.wait([wire.post(torch.frombuffer(bytearray(page), dtype=torch.uint8), 0)])

    with linked(2) as links:
        links.each(exchange)
