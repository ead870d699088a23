"""The process-wide registry of mapped version files, by inode: a recycled file keeps its mapping and touched pages."""

from __future__ import annotations

import math
import os
import threading
import weakref
from collections.abc import Callable, Iterable
from pathlib import Path as FilePath
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from tdserve.store.disk.mapped import Mapping, map_private, map_shared
from tdserve.store.rows.mapping import make_empty_leaf
from tdserve.store.weights import version_filling
from tdserve.store.weights.version_format import LENGTH, make_layout
from tdserve.structure.tensors.independent_views import make_independent_views, view_memory
from tdserve.structure.tensors.torch_types import to_torch
from tdserve.structure.trees.tree import Path, Spec


class _LeafRun(NamedTuple):
    """Contiguous leaves of one dtype, in groups of neighbours of one shape.

    Attributes:
        begin: Start of the first leaf, from the start of the data; ``end`` is the end of the last.
        num_elements: Number of elements of each group.
        shapes: Number of leaves of each group, and the shape of one.
    """

    dtype: torch.dtype
    begin: int
    end: int
    paths: list[Path]
    num_elements: list[int]
    shapes: list[tuple[int, tuple[int, ...]]]

    def add(self, path: Path, shape: tuple[int, ...]) -> None:
        """Adds the next leaf; it has at least one element."""
        self.paths.append(path)
        if self.shapes and self.shapes[-1][1] == shape:
            self.shapes[-1] = (self.shapes[-1][0] + 1, shape)
            self.num_elements[-1] += math.prod(shape)
        else:
            self.shapes.append((1, shape))
            self.num_elements.append(math.prod(shape))

    def make_views(self, content: npt.NDArray[np.uint8]) -> list[torch.Tensor]:
        """Returns the leaves in these bytes, by one call for all groups and one per group: a call per leaf would take
        as long as all other work on a version of thousands."""
        found: list[torch.Tensor] = []
        whole = view_memory(content, self.dtype, (sum(self.num_elements),), self.begin)
        groups = whole.split_with_sizes(self.num_elements)
        for group, (num_leaves, shape) in zip(groups, self.shapes, strict=True):
            if num_leaves > 1:
                found += group.view(num_leaves, *shape).unbind(0)
            else:
                found.append(group if len(shape) == 1 else group.view(shape))
        return found


class VersionMapping:
    """One mapped version file of this process.

    Attributes:
        fd: Its own descriptor: shows when the file was unlinked, and carries the writer's lock. It is closed when the
            object is dropped, never earlier: a thread may be writing through its number, which would be another file's.
        writable: Whether the mapping is writable.
    """

    def __init__(self, fd: int, *, writable: bool, path: FilePath) -> None:
        self.writable = writable
        self._mapping = map_shared(fd, os.fstat(fd).st_size, writable=writable, path=path)
        self._buffer = _view_mapping(self._mapping)
        # a description of its own: a duplicate would share the lock of the caller's descriptor
        self.fd = os.open(f"/proc/self/fd/{fd}", (os.O_RDWR if writable else os.O_RDONLY) | os.O_CLOEXEC)
        weakref.finalize(self, os.close, self.fd).atexit = False
        self._views: tuple[bytes, int, dict[Path, torch.Tensor]] | None = None

    @classmethod
    def map_private(cls, fd: int, *, path: FilePath) -> VersionMapping:
        """Returns a mapping for one user, whose writes stay private; it is not in the registry."""
        mapping = cls.__new__(cls)
        mapping.writable = False
        mapping._mapping = map_private(fd, os.fstat(fd).st_size, path=path)
        mapping._buffer = _view_mapping(mapping._mapping)
        mapping.fd = -1
        mapping._views = None
        return mapping

    def call_when_dropped(self, call: Callable[[int], None], argument: int) -> None:
        """Calls ``call`` once no tensor over the mapping lives any more."""
        weakref.finalize(self._mapping, call, argument).atexit = False

    def get_content(self) -> npt.NDArray[np.uint8]:
        """Returns the bytes of all leaves, concatenated."""
        found: npt.NDArray[np.uint8] = self._buffer.numpy()[self._start() :]
        return found

    def fill(self, pieces: Iterable[npt.NDArray[np.uint8]], *, is_touched: bool) -> None:
        """Writes the bytes of all leaves; arguments and errors as in ``version_filling.fill``."""
        version_filling.fill(self.fd, self._buffer.numpy(), self._start(), pieces, is_touched=is_touched)

    def get_leaves(self, spec: Spec) -> dict[Path, torch.Tensor]:
        """Returns the leaves as views, made once per structure: 2,000 of them take a millisecond."""
        start = self._start()
        if self._views is None or self._views[:2] != (spec.fingerprint, start):
            with torch.inference_mode(False):  # they are kept, and used in any mode
                self._views = (spec.fingerprint, start, make_leaf_views(self._buffer[start:], spec))
        return self._views[2]

    def _start(self) -> int:
        return LENGTH.size + int.from_bytes(bytes(self._buffer[: LENGTH.size].tolist()), "little")


def _view_mapping(mapping: Mapping) -> torch.Tensor:
    with torch.inference_mode(False):  # it is kept: tensors made in inference mode can only be written there
        return torch.frombuffer(mapping, dtype=torch.uint8)


def make_leaf_views(content: torch.Tensor, spec: Spec) -> dict[Path, torch.Tensor]:
    """Returns the leaves in canonical order as views of bytes in the layout of a version's file, each like a tensor of
    its own.

    Args:
        content: uint8, aligned for the widest dtype.
    """
    runs, order = _find_runs(spec)
    memory = content.numpy()
    found = make_independent_views(lambda: [view for run in runs for view in run.make_views(memory)])
    if len(order) == len(spec.tensors):
        return dict(zip(order, map(found.__getitem__, order.values()), strict=True))
    return {path: found[order[path]] if path in order else make_empty_leaf(leaf) for path, leaf in spec.tensors}


def _find_runs(spec: Spec) -> tuple[list[_LeafRun], dict[Path, int]]:
    """Returns the runs that make views of all leaves with elements in few calls, and the place of each leaf among
    these, in canonical order; kept with the spec."""
    kept: tuple[list[_LeafRun], dict[Path, int]] | None = spec.memo.get(_LeafRun)
    if kept is None:
        runs: list[_LeafRun] = []
        leaves = dict(spec.tensors)
        for path, offset, nbytes in make_layout(spec).slots:
            if not nbytes:
                continue
            dtype = to_torch(leaves[path].dtype)
            if not runs or runs[-1].dtype is not dtype or runs[-1].end != offset:
                runs.append(_LeafRun(dtype, offset, offset, [], [], []))
            runs[-1].add(path, leaves[path].shape)
            runs[-1] = runs[-1]._replace(end=offset + nbytes)
        places = {path: number for number, path in enumerate(path for run in runs for path in run.paths)}
        kept = spec.memo[_LeafRun] = runs, {path: places[path] for path, _ in spec.tensors if path in places}
    return kept


_lock = threading.Lock()
_mappings: dict[tuple[int, int], VersionMapping] = {}


def acquire(fd: int, *, writable: bool, path: FilePath) -> VersionMapping:
    """Returns the mapping of an open file; if this process has one that allows ``writable``, that one.

    Raises:
        CapacityError: The process has too many mappings. ``path`` is only for the message.
    """
    found = os.fstat(fd)
    inode = (found.st_dev, found.st_ino)
    with _lock:
        mapping = _mappings.get(inode)
        if mapping is None or (writable and not mapping.writable):
            mapping = _mappings[inode] = VersionMapping(fd, writable=writable, path=path)
        return mapping


def drop_unlinked() -> None:
    """Forgets files that have been unlinked by any process, so that their space is freed once no process uses them."""
    with _lock:
        for inode, mapping in list(_mappings.items()):
            if os.fstat(mapping.fd).st_nlink == 0:
                del _mappings[inode]
