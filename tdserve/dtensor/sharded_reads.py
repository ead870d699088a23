"""Reading a version into tensors of any placements: only the pieces that overlap what this process has."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import torch

from tdserve.base.deadline import Deadline
from tdserve.base.errors import (
    CorruptDataError,
    KeyNotFoundError,
    SpecMismatchError,
    StoreNotFoundError,
    VersionNotFoundError,
)
from tdserve.client.client import Client
from tdserve.client.cluster.cluster_client import ClusterClient
from tdserve.client.session.calls.call_deadline import within
from tdserve.client.weights.local_versions import RetiredVersionError
from tdserve.client.weights.module_misfits import SHARDED
from tdserve.client.weights.pulls import Weights
from tdserve.dtensor.sharded_index import IndexedLeaf, ShardedIndex, decode_index, index_plain, split_metadata
from tdserve.dtensor.sharded_misfits import describe_leaf, describe_value, make_sharded_misfit_error
from tdserve.dtensor.sharded_publish import read_publication
from tdserve.dtensor.state_leaves import StateLeaf, StateLeaves
from tdserve.structure.tensors.plain_tensors import write_in_place
from tdserve.structure.trees.dtypes import ITEMSIZE
from tdserve.structure.trees.nodes import Path
from tdserve.structure.trees.tree import TensorLeaf
from tdserve.structure.trees.version_subset import FLOATING

READ_NBYTES = 64 << 20
"""Most bytes that one request reads; it reads at least one piece."""

MAX_READS = 8
"""Requests at a time."""

GONE = (VersionNotFoundError, StoreNotFoundError, KeyNotFoundError, RetiredVersionError)
"""Errors of a part whose version is not kept any more."""


NUMBERS: dict[type, int] = {bool: 0, int: 1, float: 2}
"""Kinds of numbers, each of which can hold those before it."""


class FoundVersion(NamedTuple):
    """A version that is there, without its tensors.

    Attributes:
        created_s: When one that was published as a whole became visible, which another of its number has not.
    """

    version: int
    metadata: dict[str, Any]
    contents: ShardedIndex
    created_s: float = 0.0


class _Cut(NamedTuple):
    """A box that goes from a piece to a tensor of the caller's: its leaf, where it is in the piece, and its place."""

    leaf: str
    source: tuple[slice, ...]
    place: torch.Tensor


class _Copy(NamedTuple):
    """What was read, its place and the leaf that has it."""

    leaf: str
    place: torch.Tensor
    content: torch.Tensor


class _Read(NamedTuple):
    """Pieces that one request gets."""

    part: int
    cuts: dict[Path, list[_Cut]]
    nbytes: int


def find_newest(client: Client | ClusterClient, name: str, newer_than: int | None) -> FoundVersion | None:
    """Finds the newest version; None if there is nothing newer and the call does not wait. Errors as in
    ``Client.latest``."""
    while True:
        try:
            found = client.latest(name, newer_than=newer_than, select=SHARDED, numpy=False)
        except KeyNotFoundError:  # it was published as a whole
            plain = _find_plain(client, name)
            if plain is None:  # the newest is another by now
                continue
            return plain
        return None if found is None else _read_index(found, name)


def find_version(client: Client | ClusterClient, name: str, version: int) -> FoundVersion:
    """Finds a version. Errors as in ``Client.version``; one that was published as a whole must be the newest."""
    try:
        found = client.version(name, version, select=SHARDED, numpy=False)
    except KeyNotFoundError:
        plain = _find_plain(client, name)
        if plain is None or plain.version != version:
            reason = f"version {version} of {name!r} was published as a whole, and is not the newest"
            raise VersionNotFoundError(argument="version", reason=reason) from None
        return plain
    return _read_index(found, name)


def _read_index(found: Weights, name: str) -> FoundVersion:
    content = found.data[SHARDED]
    values = content.get("values", None)
    index = decode_index(
        content["index"], {} if values is None else {key: values[key] for key in tuple(values.keys())}, store=name
    )
    return FoundVersion(found.version, split_metadata(found.metadata), index)


def _find_plain(client: Client | ClusterClient, name: str) -> FoundVersion | None:
    described = client.describe(name)
    newest = next((each for each in described.versions if each.version == described.version), None)
    if newest is None or (SHARDED, "index") in described.spec.values_by_path:
        return None
    tensors = {path: (leaf.dtype, leaf.shape) for path, leaf in described.spec.tensors if isinstance(leaf, TensorLeaf)}
    values: dict[str, Any] = {}
    paths = [path for path, leaf in described.spec.values if leaf.ragged is None]
    if paths:
        try:
            content = client.version(name, described.version, select=paths, numpy=False).data
        except GONE:
            return None
        values = {".".join(path): content[path] for path in paths}
    contents = index_plain(name, described.version, tensors, values)
    found = FoundVersion(described.version, newest.metadata, contents, newest.created_s)
    return found if not paths or _is_there(client, found) else None


def _is_there(client: Client | ClusterClient, found: FoundVersion) -> bool:
    """Returns whether a version that was published as a whole is kept, and no other has its name and number."""
    name = found.contents.parts[0].name
    return any(
        (each.version, each.created_s) == (found.version, found.created_s) for each in client.describe(name).versions
    )


def _check_there(client: Client | ClusterClient, found: FoundVersion) -> None:
    """Raises VersionNotFoundError unless it is there. Parts of a sharded one are checked by their publication."""
    if not (found.contents.publication or _is_there(client, found)):
        reason = f"{found.contents.parts[0].name!r} does not have this version {found.version} any more"
        raise VersionNotFoundError(argument="version", reason=reason)


def check_fit(index: ShardedIndex, state: StateLeaves, *, into: Any, store: str, strict: bool) -> None:
    """Checks that a version fits tensors; nothing is written before.

    A number may fill a tensor without dimensions. Other values that are no tensors only one side may have.

    Args:
        into: What the tensors are of, for errors.
        strict: Whether the version may have no other leaves.

    Raises:
        SpecMismatchError: It does not; the error names the key.
    """
    for name in sorted(index.leaves.keys() | state.leaves.keys()):
        theirs, own = index.leaves.get(name), state.leaves.get(name)
        if own is None and name in state.values:
            actual = f"{describe_value(state.values[name])} in into=; give a tensor of this dtype and shape"
            raise SpecMismatchError(store=store, key=name, expected=describe_leaf(index.leaves[name]), actual=actual)
        if theirs is None and own is not None and name in index.values:
            _check_number(index.values[name], own, name, store)
        elif theirs is None or (own is None and strict):
            raise make_sharded_misfit_error(into, name, index, state, store=store)
        elif own is not None and not _is_loadable(theirs, own):
            raise SpecMismatchError(store=store, key=name, expected=describe_leaf(theirs), actual=describe_leaf(own))


def _is_loadable(theirs: IndexedLeaf, own: StateLeaf) -> bool:
    is_same = theirs.dtype == own.dtype or {theirs.dtype, own.dtype} <= {*FLOATING}
    return is_same and theirs.shape == own.shape


def _check_number(value: Any, own: StateLeaf, name: str, store: str) -> None:
    is_number = type(value) in NUMBERS and not own.shape
    if is_number and all(_convert_number(value, local) is not None for _, local in own.held):
        return
    expected = (
        f"{describe_value(value)}, in the version; a number fills only a tensor without dimensions that can hold it"
    )
    raise SpecMismatchError(store=store, key=name, expected=expected, actual=describe_leaf(own))


def _convert_number(value: Any, place: torch.Tensor) -> torch.Tensor | None:
    """Returns a number as a tensor of the dtype of a place; None if that changes its kind or value."""
    if type(value) not in NUMBERS or NUMBERS[type(value)] > _rank_kind(place.dtype):
        return None
    try:
        made = torch.tensor(value, dtype=place.dtype)
    except (RuntimeError, OverflowError):
        return None
    return made if type(value) is float or made.item() == value else None


def _rank_kind(dtype: torch.dtype) -> int:
    return NUMBERS[bool if dtype == torch.bool else float if dtype.is_floating_point else int]


def read_into(client: Client | ClusterClient, found: FoundVersion, state: StateLeaves, deadline: Deadline) -> None:
    """Reads all pieces that overlap the tensors, and copies them once all are there.

    Raises:
        TDServeError: One of ``GONE`` if a part is not kept any more, or others as in ``Client.version``. Nothing was
            written.
    """
    reads = _plan_reads(found.contents, state)
    with within(deadline):  # a read of a store that is gone would wait for another of its name
        _check_there(client, found)

    def perform(read: _Read) -> list[_Copy]:
        with within(deadline):
            return _perform(client, found.contents, read)

    with ThreadPoolExecutor(max(min(len(reads), MAX_READS), 1), "tdserve-dtensor") as threads:
        futures = [threads.submit(perform, read) for read in reads]
        try:
            copies = [each for future in futures for each in future.result()]
        finally:
            for future in futures:
                future.cancel()
    with within(deadline):
        _check_there(client, found)
    for name, own in state.leaves.items():
        if name not in found.contents.leaves:
            numbers = [(local, _convert_number(found.contents.values[name], local)) for _, local in own.held]
            copies += [_Copy(name, local, number) for local, number in numbers if number is not None]
    state.reshard()  # a pass in another thread, or of another task, may have gathered parameters meanwhile
    with torch.no_grad():
        # Of leaves that share memory, as tied parameters do, the last name's is what stays, and as a whole.
        for each in sorted(copies, key=lambda found: found.leaf.split(".")):
            write_in_place(each.place, each.content)
    for name, setter in state.setters.items():
        if name in found.contents.values:
            setter(found.contents.values[name])


def _plan_reads(index: ShardedIndex, state: StateLeaves) -> list[_Read]:
    by_part: dict[int, list[tuple[Path, int, list[_Cut]]]] = {}
    for name, own in state.leaves.items():
        leaf = index.leaves.get(name)
        if leaf is None:  # a number, which is in the index
            continue
        for piece in leaf.pieces:
            cuts = []
            for region, local in own.held:
                overlap = region.intersect(piece.region)
                if overlap is not None:
                    cuts.append(_Cut(name, overlap.locate_in(piece.region), local[overlap.locate_in(region)]))
            if cuts:
                nbytes = piece.region.num_elements * ITEMSIZE[leaf.dtype]
                by_part.setdefault(piece.part, []).append((piece.key, nbytes, cuts))
    reads: list[_Read] = []
    for part, pieces in by_part.items():
        read = _Read(part, {}, 0)
        for key, nbytes, cuts in pieces:
            if read.cuts and read.nbytes + nbytes > READ_NBYTES:
                reads.append(read)
                read = _Read(part, {}, 0)
            read.cuts[key] = cuts
            read = read._replace(nbytes=read.nbytes + nbytes)
        reads.append(read)
    return reads


def _perform(client: Client | ClusterClient, contents: ShardedIndex, read: _Read) -> list[_Copy]:
    """Makes a request; returns places and what goes there."""
    part = contents.parts[read.part]
    if contents.publication:
        # A read of a store that is gone would wait for another of its name; one of that may have this number, too.
        kept = {each.version: each for each in client.describe(part.name).versions}
        if part.version not in kept or read_publication(kept[part.version].metadata) != contents.publication:
            reason = f"{part.name!r} does not have version {part.version} of this publish any more"
            raise VersionNotFoundError(argument="version", reason=reason)
    select = None if len(read.cuts) == part.num_pieces else list(read.cuts)
    weights = client.version(part.name, part.version, select=select, copy=False, numpy=False)
    if contents.publication and read_publication(weights.metadata) != contents.publication:
        reason = f"{part.name!r} was deleted and created again"
        raise VersionNotFoundError(argument="version", reason=reason)
    copies = []
    for key, cuts in read.cuts.items():
        content = weights.data[key]
        copies += [_Copy(cut.leaf, cut.place, content[cut.source]) for cut in cuts]
    for each in copies:
        expected, actual = each.place.shape, each.content.shape
        if expected != actual:
            raise CorruptDataError(path=f"weights {part.name!r}", expected=str(expected), actual=str(actual))
    num_used = sum(each.content.nbytes for each in copies)
    if 2 * num_used <= read.nbytes:  # the rest of what was read need not stay in memory
        copies = [each._replace(content=each.content.clone()) for each in copies]
    return copies
