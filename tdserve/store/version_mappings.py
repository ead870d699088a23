"""The process-wide registry of mapped version files, by inode: a recycled file keeps its mapping and touched pages."""

from __future__ import annotations

import os
import threading
from pathlib import Path as FilePath

import torch

from tdserve.spec.tree import Path, Spec
from tdserve.store.mapping import leaf_view, map_bytes
from tdserve.store.version_format import LENGTH, layout_of


class VersionMapping:
    """One mapped version file of this process.

    Attributes:
        fd: Its own descriptor: shows when the file was unlinked, and carries the writer's lock.
        writable: Whether the mapping is.
    """

    def __init__(self, fd: int, *, writable: bool, path: FilePath) -> None:
        self.writable = writable
        nbytes = os.fstat(fd).st_size
        self._buffer = map_bytes(fd, nbytes, writable=writable, path=path)
        # a description of its own, for a duplicate would share the lock of whoever gave us the descriptor
        self.fd = os.open(f"/proc/self/fd/{fd}", (os.O_RDWR if writable else os.O_RDONLY) | os.O_CLOEXEC)
        self._views: tuple[bytes, int, dict[Path, torch.Tensor]] | None = None

    def leaves(self, spec: Spec) -> dict[Path, torch.Tensor]:
        """The leaves as views, made once per structure: 2,000 of them take 10 ms."""
        start = LENGTH.size + int.from_bytes(bytes(self._buffer[: LENGTH.size].tolist()), "little")
        if self._views is None or self._views[:2] != (spec.fingerprint, start):
            offsets = layout_of(spec).offsets
            views = {path: leaf_view(self._buffer, start + offsets[path], leaf) for path, leaf in spec.tensors}
            self._views = (spec.fingerprint, start, views)
        return self._views[2]

    def close(self) -> None:
        """Closes the descriptor; the pages go with the last view of them."""
        os.close(self.fd)


_lock = threading.Lock()
_mappings: dict[tuple[int, int], VersionMapping] = {}


def acquire(fd: int, *, writable: bool, path: FilePath) -> VersionMapping:
    """The mapping of an open file, the same as before if this process has one that allows what is asked.

    Raises:
        CapacityError: The process has too many mappings. ``path`` is only for the message.
    """
    found = os.fstat(fd)
    inode = (found.st_dev, found.st_ino)
    with _lock:
        mapping = _mappings.get(inode)
        if mapping is None or (writable and not mapping.writable):
            if mapping is not None:
                mapping.close()
            mapping = _mappings[inode] = VersionMapping(fd, writable=writable, path=path)
        return mapping


def drop_unlinked() -> None:
    """Forgets the files that nobody can open any more, whoever unlinked them, so that their space is freed."""
    with _lock:
        for inode, mapping in list(_mappings.items()):
            if os.fstat(mapping.fd).st_nlink == 0:
                del _mappings[inode]
                mapping.close()
