"""The index of a sharded version: which pieces each leaf has, and which version of which part has each of them."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from tdserve.base.errors import CorruptDataError, NotSupportedError, SpecMismatchError
from tdserve.client.weights.module_misfits import SHARDED
from tdserve.dtensor.shard_regions import Region, find_overlap, has_all_once, make_whole
from tdserve.structure.trees.dtypes import ITEMSIZE
from tdserve.structure.trees.nodes import Path

FORMAT = 1
"""Of the index; a reader refuses others."""


def name_part(name: str, rank: int) -> str:
    """Returns the name of the weights that a rank publishes its pieces as."""
    return f"{name}.part-{rank}"


class PartVersion(NamedTuple):
    """A version that has pieces.

    Attributes:
        name: Name of its weights.
        version: Its number.
        num_pieces: How many leaves it has.
    """

    name: str
    version: int
    num_pieces: int


class IndexedPiece(NamedTuple):
    """A box of a leaf.

    Attributes:
        part: Number of the part that has it.
        key: Its key in the part.
        region: Where it is in the whole tensor.
    """

    part: int
    key: Path
    region: Region


class IndexedLeaf(NamedTuple):
    """A leaf of the whole version."""

    dtype: str
    shape: tuple[int, ...]
    pieces: Sequence[IndexedPiece]


@dataclass(frozen=True)
class ShardedIndex:
    """What a version consists of.

    Attributes:
        publication: Identity of the publish, which each part has in its metadata; "" if there are no parts.
        parts: Where its pieces are.
        leaves: Its leaves by name.
        values: What is no tensor, by name.
    """

    publication: str
    parts: Sequence[PartVersion]
    leaves: Mapping[str, IndexedLeaf]
    values: Mapping[str, Any] = field(default_factory=dict)

    def encode(self) -> str:
        """Returns the index without the values, as JSON."""
        return encode_index(self.publication, self.parts, encode_leaves(self.leaves))


def encode_index(publication: str, parts: Sequence[PartVersion], leaves: str) -> str:
    """Returns an index as JSON, with leaves that ``encode_leaves`` has returned.

    It has no names of parts, so that it stays right when all of them are restored under other names.
    """
    versions = [(part.version, part.num_pieces) for part in parts]
    head = json.dumps({"format": FORMAT, "publication": publication, "parts": versions}, separators=(",", ":"))
    return f'{head[:-1]},"leaves":{leaves}}}'


def encode_leaves(leaves: Mapping[str, IndexedLeaf]) -> str:
    """Returns the leaves of an index as JSON; they take longer than the rest, and seldom change."""
    found = {
        name: [leaf.dtype, leaf.shape, [[piece.part, piece.key[0], *piece.region] for piece in leaf.pieces]]
        for name, leaf in leaves.items()
    }
    return json.dumps(found, separators=(",", ":"))


def decode_index(text: str, values: Mapping[str, Any], *, store: str) -> ShardedIndex:
    """Reads an index.

    Args:
        text: What ``encode`` has returned.
        values: What is no tensor, by name.
        store: Name of the weights, after which the parts are named: the first is of rank 0.

    Raises:
        NotSupportedError: It is of another format.
        CorruptDataError: It is not an index.
    """
    try:
        found = json.loads(text)
        if found["format"] != FORMAT:
            reason = f"this tdserve reads format {FORMAT}; both ends need one version of tdserve"
            raise NotSupportedError(feature=f"format {found['format']} of sharded weights {store!r}", reason=reason)
        leaves = {
            name: IndexedLeaf(
                dtype,
                tuple(shape),
                [
                    IndexedPiece(part, (key,), Region(tuple(offsets), tuple(sizes)))
                    for part, key, offsets, sizes in pieces
                ],
            )
            for name, (dtype, shape, pieces) in found["leaves"].items()
        }
        parts = [
            PartVersion(name_part(store, rank), version, num_pieces)
            for rank, (version, num_pieces) in enumerate(found["parts"])
        ]
        hole = next((name for name, leaf in leaves.items() if not _is_whole(leaf)), None)
        index = ShardedIndex(found["publication"], parts, leaves, values)
    except (KeyError, TypeError, ValueError) as error:
        what = f"{type(error).__name__}: {error}"
        raise CorruptDataError(path=f"weights {store!r}", expected="the index of a version", actual=what) from error
    if hole is not None:
        leaf = leaves[hole]
        actual = f"{len(leaf.pieces)} pieces with other boxes"
        expected = f"pieces of {hole!r} that have each element of {leaf.dtype}{list(leaf.shape)} once"
        raise CorruptDataError(path=f"weights {store!r}", expected=expected, actual=actual)
    return index


def _is_whole(leaf: IndexedLeaf) -> bool:
    return has_all_once([piece.region for piece in leaf.pieces], leaf.shape)


@dataclass(frozen=True)
class RankLeaf:
    """What a rank has of a leaf, without its content."""

    dtype: str
    shape: tuple[int, ...]
    is_sharded: bool
    regions: Sequence[Region]

    @property
    def text(self) -> str:
        """Dtype, shape and kind, for errors."""
        return f"{'a DTensor' if self.is_sharded else 'a plain tensor'} of {self.dtype}{list(self.shape)}"


class OwnedPiece(NamedTuple):
    """A piece, and the rank that publishes it.

    Its key has a number even if it is the only one, so that no two leaves can have pieces of one key.
    """

    rank: int
    key: str
    region: Region


def assign_pieces(ranks: Sequence[Mapping[str, RankLeaf]], *, store: str) -> dict[str, list[OwnedPiece]]:
    """Returns which rank publishes which pieces of each leaf; every rank computes the same.

    Of a box that several ranks have, one publishes it: that which has least to publish so far. Of a leaf that is plain
    it is the first rank that has it.

    Raises:
        SpecMismatchError: Ranks differ in a leaf, or together do not have all of it once.
    """
    loads = [0] * len(ranks)
    found: dict[str, list[OwnedPiece]] = {}
    for name in dict.fromkeys(name for leaves in ranks for name in leaves):
        having = {rank: leaves[name] for rank, leaves in enumerate(ranks) if name in leaves}
        first_rank, first = next(iter(having.items()))
        for rank, other in having.items():
            if (other.dtype, other.shape, other.is_sharded) != (first.dtype, first.shape, first.is_sharded):
                actual = f"{other.text} at rank {rank}"
                raise SpecMismatchError(
                    store=store, key=name, expected=f"{first.text} as at rank {first_rank}", actual=actual
                )
        holders: dict[Region, list[int]] = {}
        for rank, leaf in having.items() if first.is_sharded else [(first_rank, first)]:
            for region in leaf.regions:
                holders.setdefault(region, []).append(rank)
        num_held = sum(region.num_elements for region in holders)
        if num_held != math.prod(first.shape):
            actual = f"boxes with {num_held} elements at the ranks of the group"
            expected = f"all {math.prod(first.shape)} elements of {first.text} once"
            raise SpecMismatchError(store=store, key=name, expected=expected, actual=actual)
        overlap = find_overlap(holders)
        if overlap is not None:
            actual = " and ".join(f"{region.text} at rank {holders[region][0]}" for region in overlap)
            expected = f"placements of {first.text} that are the same at every rank"
            raise SpecMismatchError(store=store, key=name, expected=expected, actual=f"{actual}, which overlap")
        found[name] = []
        for number, (region, candidates) in enumerate(sorted(holders.items())):
            rank = min(candidates, key=loads.__getitem__)
            loads[rank] += region.num_elements * ITEMSIZE[first.dtype]
            found[name].append(OwnedPiece(rank, f"{name}#{number}", region))
    return found


def index_plain(
    name: str, version: int, tensors: Mapping[Path, tuple[str, tuple[int, ...]]], values: Mapping[str, Any]
) -> ShardedIndex:
    """Returns an index of a version that was published as a whole: each leaf is one piece.

    Args:
        tensors: Dtype and shape of each leaf.
        values: What is no tensor, by name.

    Raises:
        NotSupportedError: Two leaves have one name, as ``a.b`` and ``b`` below ``a`` do.
    """
    leaves = {
        ".".join(path): IndexedLeaf(
            dtype, shape, [IndexedPiece(0, path, make_whole(shape))] if math.prod(shape) else []
        )
        for path, (dtype, shape) in tensors.items()
    }
    if len(leaves) < len(tensors):
        names = [".".join(path) for path in tensors]
        twice = next(each for number, each in enumerate(names) if each in names[:number])
        reason = f"two of its leaves have the name {twice!r}"
        raise NotSupportedError(feature=f"reading version {version} of weights {name!r} into shards", reason=reason)
    return ShardedIndex("", [PartVersion(name, version, len(tensors))], leaves, values)


def split_metadata(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the publisher's part of a version's metadata."""
    return {key: value for key, value in metadata.items() if key != SHARDED}
