"""Which part of a DTensor a rank has: boxes of the whole tensor, and where each lies in the local tensor.

It is computed from the placements, since torch names one offset for each local tensor, and a shard of a shard that was
cut from right to left (FSDP over tensor parallelism, where the sizes are uneven) lies at several.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from functools import lru_cache
from itertools import pairwise, product
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from tdserve.base.errors import NotSupportedError

Run = tuple[int, int]
"""Consecutive indices of one dimension: the first one, and their number."""


class Region(NamedTuple):
    """A box of a tensor.

    Attributes:
        offsets: Its first index in each dimension.
        sizes: Its number of indices in each dimension.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def num_elements(self) -> int:
        """Number of its elements."""
        return math.prod(self.sizes)

    @property
    def text(self) -> str:
        """Its indices, as in Python."""
        runs = zip(self.offsets, self._ends, strict=True)
        return f"[{', '.join(f'{start}:{end}' for start, end in runs)}]"

    def intersect(self, other: Region) -> Region | None:
        """Returns the box that is in both; None if there is none."""
        offsets = tuple(map(max, self.offsets, other.offsets))
        mine, theirs = self._ends, other._ends
        sizes = tuple(min(a, b) - start for a, b, start in zip(mine, theirs, offsets, strict=True))
        return Region(offsets, sizes) if all(size > 0 for size in sizes) else None

    def locate_in(self, outer: Region) -> tuple[slice, ...]:
        """Returns the index of this box in the content of one that has all of it."""
        starts = [mine - theirs for mine, theirs in zip(self.offsets, outer.offsets, strict=True)]
        return tuple(slice(start, start + size) for start, size in zip(starts, self.sizes, strict=True))

    @property
    def _ends(self) -> tuple[int, ...]:
        return tuple(map(sum, zip(self.offsets, self.sizes, strict=True)))


Place = tuple[Region, tuple[slice, ...]]
"""A box of a tensor, and its index in the local tensor."""

NUM_REMEMBERED = 4096
"""How many shapes, each with its cuts, a process does not cut again."""


class Cut(NamedTuple):
    """What a placement does to a dimension: see ``_cut``."""

    dim: int
    number: int
    num_chunks: int
    split_factor: int


def make_whole(shape: Sequence[int]) -> Region:
    """Returns the box of all elements of a tensor."""
    return Region((0,) * len(shape), tuple(shape))


def find_overlap(regions: Collection[Region]) -> tuple[Region, Region] | None:
    """Returns two of the boxes of a tensor that have an element in common; None if no two have.

    Boxes that placements make are the cells of a grid, which is found out without a look at each two of them.
    """
    if len(regions) < 2 or (_is_grid(regions) and len(set(regions)) == len(regions)):
        return None
    active: list[Region] = []
    for region in sorted(regions):
        start = region.offsets[:1]
        active = [each for each in active if each._ends[:1] > start]
        for each in active:
            if each.intersect(region) is not None:
                return each, region
        active.append(region)
    return None


def has_all_once(regions: Collection[Region], shape: Sequence[int]) -> bool:
    """Returns whether each element of a tensor is in one of the boxes, and in no other."""
    if sum(math.prod(sizes) for _, sizes in regions) != math.prod(shape):
        return False
    runs = zip(_list_runs(regions), shape, strict=False)  # of no boxes there are no runs
    return find_overlap(regions) is None and all(
        first >= 0 and first + size <= end for found, end in runs for first, size in found
    )


def _is_grid(regions: Collection[Region]) -> bool:
    """Returns whether boxes that differ are cells of one grid: in each dimension, two of them have the same indices or
    none in common."""
    return all(
        first + size <= start for found in _list_runs(regions) for (first, size), (start, _) in pairwise(sorted(found))
    )


def _list_runs(regions: Collection[Region]) -> list[set[Run]]:
    """Lists what boxes have of each dimension. There may be many boxes, so no loop of Python goes over them."""
    offsets, sizes = zip(*regions, strict=True) if regions else ((), ())
    dims = zip(zip(*offsets, strict=True), zip(*sizes, strict=True), strict=True)
    return [set(zip(starts, lengths, strict=True)) for starts, lengths in dims]


def list_regions(tensor: DTensor, key: str, *, store: str = "") -> Sequence[Place]:
    """Returns the boxes that this rank has of a tensor, each with its index in the local tensor; none for a rank that
    is not in the mesh.

    Raises:
        NotSupportedError: A placement is ``Partial``, or unknown. The error names the key.
    """
    coordinate = tensor.device_mesh.get_coordinate()
    cuts: list[Cut] = []
    for number, placement in enumerate(tensor.placements):
        if isinstance(placement, Replicate):
            continue
        placed: Any = placement
        if isinstance(placement, Partial) or not (isinstance(placement, Shard) or hasattr(placed, "split_factor")):
            raise _make_placement_error(placed, key, store)
        if coordinate is not None:
            num_chunks = int(tensor.device_mesh.size(number))
            cuts.append(Cut(placed.dim, coordinate[number], num_chunks, int(getattr(placed, "split_factor", 1))))
    if coordinate is None:
        return []
    local_shape, found = _cut_all(tuple(tensor.shape), tuple(cuts))
    actual_shape = tuple(get_local(tensor).shape)
    if local_shape != actual_shape:
        reason = f"its local tensor has shape {actual_shape}, and its placements {local_shape}"
        raise NotSupportedError(feature=f"key {key!r} of weights {store!r}, a DTensor", reason=reason)
    return found


@lru_cache(NUM_REMEMBERED)
def _cut_all(shape: tuple[int, ...], cuts: tuple[Cut, ...]) -> tuple[tuple[int, ...], tuple[Place, ...]]:
    """Returns the shape of the local tensor, and the boxes in it. Layers have the same few shapes at each publish."""
    runs: list[list[Run]] = [[(0, size)] for size in shape]
    for cut in cuts:
        runs[cut.dim] = _cut(runs[cut.dim], cut.number, cut.num_chunks, cut.split_factor)
    return tuple(sum(size for _, size in each) for each in runs), tuple(_combine(runs))


def _combine(runs: Sequence[Sequence[Run]]) -> Iterator[Place]:
    """Yields each combination of runs of the dimensions, except those that are empty."""
    places = []
    for each in runs:
        start, placed = 0, []
        for first, size in each:
            placed.append((first, size, slice(start, start + size)))
            start += size
        places.append(placed)
    for box in product(*places):
        region = Region(tuple(first for first, _, _ in box), tuple(size for _, size, _ in box))
        if region.num_elements:
            yield region, tuple(index for _, _, index in box)


def _cut(runs: Sequence[Run], number: int, num_chunks: int, split_factor: int) -> list[Run]:
    """Returns what a rank gets of the runs that a dimension has: its chunk of each of ``split_factor`` chunks.

    Chunks are those of ``torch.chunk``: all of one size, except the last ones.
    """
    length = sum(size for _, size in runs)
    split_size = -(-length // split_factor)
    found: list[Run] = []
    for split in range(split_factor):
        start, stop = (min(split_size * edge, length) for edge in (split, split + 1))
        chunk_size = -(-(stop - start) // num_chunks)
        first, last = (min(start + chunk_size * edge, stop) for edge in (number, number + 1))
        for run in _slice_runs(runs, first, last):
            if found and sum(found[-1]) == run[0]:
                found[-1] = (found[-1][0], found[-1][1] + run[1])
            else:
                found.append(run)
    return found


def _slice_runs(runs: Sequence[Run], start: int, stop: int) -> Iterator[Run]:
    """Yields the indices from ``start`` to ``stop``, counted along the runs."""
    position = 0
    for first, size in runs:
        low, high = max(start, position), min(stop, position + size)
        if low < high:
            yield first + low - position, high - low
        position += size


def _make_placement_error(placement: Any, key: str, store: str) -> NotSupportedError:
    reason = f"no rank has its content with placement Partial ({placement}): publish its .redistribute()"
    if not isinstance(placement, Partial):
        reason = f"only Shard, Replicate and FSDP's shards of shards can be read, not a {type(placement).__name__}"
    return NotSupportedError(feature=f"key {key!r} of weights {store!r}, a DTensor", reason=reason)


def get_local(tensor: torch.Tensor) -> torch.Tensor:
    """Returns what this process has of a tensor: of a DTensor its local tensor, once it has arrived."""
    if not isinstance(tensor, DTensor):
        return tensor
    with torch.no_grad():
        local: Any = tensor.to_local()
        return local.wait() if hasattr(local, "wait") else local  # type: ignore[no-any-return]
