"""Boxes of DTensors, against what torch itself cuts for each rank of a mesh. No rank is real: nothing is sent."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

from tdserve.base.errors import NotSupportedError
from tdserve.dtensor.shard_regions import Region, find_overlap, has_all_once, list_regions, make_whole

STRIDED: Any = _StridedShard


@contextmanager
def join(rank: int, size: int) -> Iterator[None]:
    """Makes a default process group without its other ranks."""
    dist.init_process_group("fake", rank=rank, world_size=size, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


PLACEMENTS: list[tuple[tuple[int, ...], list[Any]]] = [
    ((4,), [Shard(0)]),
    ((3,), [Shard(1)]),
    ((2, 3), [Shard(0), Shard(1)]),
    ((2, 3), [Shard(1), Shard(1)]),
    ((2, 2), [Replicate(), Shard(0)]),
    ((2, 2), [STRIDED(0, split_factor=2), Shard(0)]),
    ((3, 2), [STRIDED(1, split_factor=2), Shard(1)]),
    ((2, 2), [STRIDED(0, split_factor=3), Replicate()]),
    ((2, 2, 2), [STRIDED(0, split_factor=2), Replicate(), Shard(0)]),
]


@pytest.mark.parametrize(("mesh_shape", "placements"), PLACEMENTS)
@pytest.mark.parametrize("shape", [(8, 12), (7, 5), (1, 2), (13, 3)])
def test_regions_when_joined_then_are_the_local_tensor_and_cover_the_whole(
    mesh_shape: Sequence[int], placements: Sequence[Placement], shape: Sequence[int]
) -> None:
    full = torch.arange(shape[0] * shape[1]).reshape(*shape)
    size = torch.Size(mesh_shape).numel()
    num_held = torch.zeros_like(full)
    for rank in range(size):
        with join(rank, size):
            mesh = init_device_mesh("cpu", tuple(mesh_shape))
            tensor = distribute_tensor(full, mesh, placements, src_data_rank=None)
            local = tensor.to_local()
            joined = torch.full_like(local, -1)
            for region, index in list_regions(tensor, "key"):
                box = region.locate_in(make_whole(shape))
                joined[index] = full[box]
                num_held[box] += 1
            assert torch.equal(joined, local)
    num_replicas = 1
    for each, placement in zip(mesh_shape, placements, strict=True):
        num_replicas *= each if isinstance(placement, Replicate) else 1
    assert torch.equal(num_held, torch.full_like(full, num_replicas))


def test_regions_when_rank_is_not_in_the_mesh_then_none() -> None:
    with join(2, 3):
        mesh = torch.distributed.device_mesh.DeviceMesh("cpu", torch.arange(2))
        tensor = DTensor.from_local(
            torch.zeros(0), mesh, [Shard(0)], run_check=False, shape=torch.Size([4]), stride=(1,)
        )
        assert list_regions(tensor, "key") == []


@pytest.mark.parametrize("placement", [Partial(), Partial("max")])
def test_regions_when_a_placement_is_partial_then_refused_by_key(placement: Placement) -> None:
    with join(0, 2):
        mesh = init_device_mesh("cpu", (2,))
        tensor = DTensor.from_local(torch.zeros(4), mesh, [placement], run_check=False)
        with pytest.raises(NotSupportedError, match=r"key 'a.b' of weights 'w', a DTensor.*Partial"):
            list_regions(tensor, "a.b", store="w")


def test_regions_when_local_tensor_has_another_shape_then_refused_by_key() -> None:
    with join(0, 2):
        mesh = init_device_mesh("cpu", (2,))
        tensor = DTensor.from_local(
            torch.zeros(3), mesh, [Shard(0)], run_check=False, shape=torch.Size([9]), stride=(1,)
        )
        with pytest.raises(
            NotSupportedError, match=r"key 'a'.*local tensor has shape \(3,\), and its placements \(5,\)"
        ):
            list_regions(tensor, "a")


def test_intersection_when_boxes_touch_or_overlap_then_is_what_both_have() -> None:
    box = Region((2, 0), (3, 4))
    assert box.intersect(Region((4, 1), (9, 2))) == Region((4, 1), (1, 2))
    assert box.intersect(Region((5, 0), (1, 4))) is None
    assert Region((), ()).intersect(Region((), ())) == Region((), ())
    assert Region((4, 1), (1, 2)).locate_in(box) == (slice(2, 3), slice(1, 3))


BRICKS = [Region((0, 0), (2, 1)), Region((0, 1), (1, 2)), Region((1, 1), (2, 1)), Region((1, 2), (2, 1))]
"""Boxes of no grid, which have all of a tensor of shape (3, 3) with the last."""


def test_boxes_when_they_are_no_grid_then_an_overlap_is_found() -> None:
    assert find_overlap(BRICKS) is None
    assert has_all_once([*BRICKS, Region((2, 0), (1, 1))], (3, 3))
    found = find_overlap([*BRICKS, Region((1, 0), (1, 2))])
    assert found == (Region((0, 0), (2, 1)), Region((1, 0), (1, 2)))
    assert find_overlap([BRICKS[0], BRICKS[0]]) == (BRICKS[0], BRICKS[0])


def test_boxes_when_a_tensor_has_no_dimensions_or_elements_then_all_are_there() -> None:
    assert has_all_once([make_whole(())], ())
    assert not has_all_once([make_whole(())] * 2, ())
    assert not has_all_once([], ())
    assert has_all_once([], (0, 3))
