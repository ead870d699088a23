from __future__ import annotations

import pytest
import torch

from tdserve.client.groups.member_parts import GivenPart, TakenPart
from tdserve.client.groups.movers import DeviceLeaves, HostMover
from tdserve.messages.layout import LARGE_LEAF_BYTES
from tdserve.transport.group_content import CallChannel
from tests.group_members import LARGE, SMALL, content, number_in
from tests.unit.transport.group_channels import open_channels


def test_device_leaves_when_of_all_sizes_then_small_ones_are_one_flat_and_all_are_put_back() -> None:
    def tensors(number: int) -> list[torch.Tensor]:
        large = torch.full((LARGE_LEAF_BYTES // 4, 2), float(number))
        small = [torch.full((3,), number, dtype=torch.uint8), torch.full((5, 2), float(number)).T, torch.zeros(0)]
        return [*small, torch.full((LARGE_LEAF_BYTES // 8,), number), large[:, 0]]

    here, there = DeviceLeaves(tensors(1)), tensors(2)
    target = DeviceLeaves(there)
    assert [flat.dtype for flat in here.flats] == [torch.uint8] * 3
    assert [len(flat) for flat in here.flats] == [LARGE_LEAF_BYTES, LARGE_LEAF_BYTES, 43]
    for flat, other in zip(target.flats, here.flats, strict=True):
        flat.copy_(other)
    target.spread()
    for tensor, expected in zip(there, tensors(1), strict=True):
        assert torch.equal(tensor, expected)


@pytest.mark.parametrize("num_floats", [SMALL, LARGE])
def test_host_mover_when_it_gives_and_broadcasts_then_taken_whole(num_floats: int) -> None:
    mover = HostMover()

    def play(channel: CallChannel) -> list[int]:
        given = GivenPart(content(channel.rank, num_floats), name="g", allow_pickle=False)
        found = []
        for src in range(3):
            taken = TakenPart(None, name="g", allow_pickle=False)
            if channel.rank == src:
                mover.broadcast_from(channel, given)
            else:
                nbytes = GivenPart(content(src, num_floats), name="g", allow_pickle=False).values_nbytes
                mover.broadcast_to(channel, taken, given.spec, nbytes, src)
                found.append(number_in(taken.finish(given.spec), num_floats))
        if channel.rank == 0:
            mover.give(channel, given, 2)
        elif channel.rank == 2:
            taken = TakenPart(None, name="g", allow_pickle=False)
            mover.take(channel, taken, given.spec, given.values_nbytes, 0)
            found.append(number_in(taken.finish(given.spec), num_floats))
        return found

    with open_channels(3) as channels:
        assert channels.each(play) == [[1, 2], [0, 2], [0, 1, 0]]
