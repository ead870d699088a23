"""Versions of which a client has a part: leaves that have not changed since its last version are not sent.

The client remembers where it has put versions. When it requests another one, the server names the leaves that have not
changed in between. The client then compares the checksums of its own leaves, since the user may have changed them.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from threading import Lock
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from tdserve.base.errors import RemoteProtocolError, TDServeError
from tdserve.client.content.leaves import Leaves, make_leaves
from tdserve.client.content.read_content import Destination
from tdserve.client.content.received import make_views
from tdserve.client.weights.lru_names import NewestNames
from tdserve.messages.content import read_layout, write_layout
from tdserve.messages.layout import Layout
from tdserve.rules.weights import MIN_COMPARED_BYTES
from tdserve.store.weights.version_checksums import DTYPE, compute_leaf_checksum
from tdserve.structure.captures.capture import capture
from tdserve.structure.tensors.torch_types import view_bytes
from tdserve.structure.trees.tree import Path, Spec, check_matches
from tdserve.structure.trees.version_subset import decode_numbers, select_leaves
from tdserve.transport.pool import BufferPool
from tdserve.v1 import control_pb2

MAX_PLACES = 4
"""Places for one store, such as several copies of a policy, that are filled in turn."""


@dataclass(frozen=True)
class HeldVersion:
    """A version of which this client has the leaves.

    Attributes:
        version: Its number.
        leaves: Its tensors and their bytes, in the order of the packed layout.
    """

    version: int
    leaves: Leaves


@dataclass(frozen=True)
class _PlacedVersion:
    version: int
    spec: Spec


@dataclass(frozen=True)
class _Returned(_PlacedVersion):
    td: weakref.ReferenceType[Any]


class HeldVersions:
    """Where the versions of all stores were put. Threads: safe. Does not keep these places alive."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._returned: NewestNames[_Returned] = NewestNames()
        self._filled: NewestNames[dict[tuple[int, ...], _PlacedVersion]] = NewestNames()

    def find_last(self, name: str, *, has_place: bool) -> int:
        """Returns the number of the version that was last put into a place of the user, or returned; or 0.

        Does not check it.
        """
        with self._lock:
            if has_place:
                places = self._filled.get(name)
                return next(reversed(places.values())).version if places else 0
            returned = self._returned.get(name)
            return 0 if returned is None or returned.td() is None else returned.version

    def find(self, name: str, destination: Destination | None) -> HeldVersion | None:
        """Returns what a destination holds.

        Without one, what the user still has of the tensordict that was returned last.
        """
        with self._lock:
            returned = self._returned.get(name)
            filled = dict(self._filled.get(name) or {})
        if destination is None:
            return None if returned is None else _find_returned(returned, name)
        for spec in {id(place.spec): place.spec for place in filled.values()}.values():
            leaves, _ = destination.match_places(spec, read_layout(spec, is_packed=True))
            place = None if leaves is None else filled.get(_find_addresses(leaves))
            if place is not None and leaves is not None:
                return HeldVersion(place.version, leaves)
        return None

    def keep(self, name: str, version: int, spec: Spec, *, destination: Destination | None, td: Any) -> None:
        """Remembers where a version was put: in a destination, or in a new tensordict on the CPU."""
        if spec.nbytes < MIN_COMPARED_BYTES or spec.has_ragged:
            return
        if destination is None:
            with self._lock:
                self._returned.put(name, _Returned(version, spec, weakref.ref(td)))
            return
        leaves, _ = destination.match_places(spec, read_layout(spec, is_packed=True))
        if leaves is not None:
            with self._lock:
                places = self._filled.get(name) or {}
                self._filled.put(name, places)
                places.pop(addresses := _find_addresses(leaves), None)
                places[addresses] = _PlacedVersion(version, spec)
                while len(places) > MAX_PLACES:
                    del places[next(iter(places))]


def _find_returned(returned: _Returned, name: str) -> HeldVersion | None:
    td = returned.td()
    if td is None:
        return None
    try:
        captured = capture(td, store=name)
        check_matches(returned.spec, captured.spec, store=name)
    except TDServeError:  # its structure has changed
        return None
    leaves = make_leaves(captured, read_layout(returned.spec, is_packed=True))
    return None if leaves.contents is None else HeldVersion(returned.version, leaves)


def _find_addresses(leaves: Leaves) -> tuple[int, ...]:
    """Returns begin and end of a place, which identify it.

    Comparing more than these would cost more than it saves for thousands of leaves, since checksums show what a place
    holds.
    """
    tensors = leaves.tensors
    return (len(tensors), tensors[0].data_ptr(), tensors[-1].data_ptr()) if tensors else ()


class PartialVersion:
    """A version of which only a part is sent.

    Args:
        spec: Structure of the whole version.
        accepted: Names the leaves that are not sent.
        held: Contains these leaves; None: they turned out to be missing.
        destination: Where the version goes.

    Attributes:
        layout: Layout of the part that is sent.
        into: Where it goes; None: a new buffer.

    Raises:
        RemoteProtocolError: The server's message is inconsistent.
    """

    def __init__(
        self, spec: Spec, accepted: control_pb2.Accepted, held: HeldVersion | None, destination: Destination | None
    ) -> None:
        self._spec = spec
        self._whole = read_layout(spec, is_packed=True)
        numbers = decode_numbers(accepted.unchanged, spec)
        checksums: NDArray[np.uint64] = np.frombuffer(accepted.checksums[: 8 * len(numbers)], DTYPE)
        if len(accepted.checksums) != 8 * len(numbers):
            raise RemoteProtocolError(
                expected=f"checksums of {len(numbers)} leaves", received=f"{len(accepted.checksums)} bytes of them"
            )
        self._checksums: dict[int, int] = dict(zip(numbers, checksums.tolist(), strict=True))
        self._held = None if held is None else held.leaves
        places = None
        if destination is not None:  # a mismatch is found when the leaves are here
            places, _ = destination.match_places(spec, self._whole)
        self._places = places
        self.layout = read_layout(select_leaves(spec, self._list_other_numbers(self._checksums)), is_packed=True)
        self.into = None if places is None else _pick(self.layout, self._whole, places)

    def merge(
        self, received: Mapping[Path, torch.Tensor], pool: BufferPool
    ) -> tuple[dict[Path, torch.Tensor], list[int]]:
        """Returns all leaves of the version, and the numbers of those that are not what they should be.

        Leaves outside of a destination are copied, since nothing else may change the result.
        """
        paths = [self._spec.tensors[number][0] for number in self._checksums]
        at = self._whole.leaf_numbers
        if self._places is not None:
            tensors = self._places.tensors
            kept = {path: tensors[at[path]] for path in paths}
        else:
            layout = write_layout(select_leaves(self._spec, list(self._checksums)), is_packed=True)
            columns = make_views(layout, pool.take(layout.nbytes))
            kept = dict(zip(layout.leaf_paths, columns, strict=True))
            contents = [] if self._held is None else self._held.contents or []
            for path, tensor in kept.items() if contents else ():
                np.copyto(view_bytes(tensor).numpy(), contents[at[path]])
        if self._held is None:
            return {**received, **kept}, list(self._checksums)
        return {**received, **kept}, self.find_wrong(kept, self._checksums)

    def find_wrong(self, leaves: Mapping[Path, torch.Tensor], numbers: Iterable[int]) -> list[int]:
        """Returns which of some leaves of the version are not what they should be."""
        paths = {number: self._spec.tensors[number][0] for number in numbers}
        return [
            number
            for number, path in paths.items()
            if compute_leaf_checksum(view_bytes(leaves[path]).numpy()) != self._checksums[number]
        ]

    def _list_other_numbers(self, left_out: Mapping[int, int]) -> list[int]:
        return [number for number in range(len(self._spec.tensors)) if number not in left_out]


def _pick(layout: Layout, whole: Layout, leaves: Leaves) -> Leaves:
    """Returns the leaves of a layout, in its order, from those of the whole version."""
    numbers = [whole.leaf_numbers[path] for path in layout.leaf_paths]
    contents = leaves.contents or []
    return Leaves([leaves.tensors[number] for number in numbers], [contents[number] for number in numbers])
