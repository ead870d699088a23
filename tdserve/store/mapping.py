"""Opens the tensor leaves of a store as torch tensors over shared mappings.

``tensordict.load_memmap`` is not used here: it grows truncated files, follows symlinks, and needs the tensorclass.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from math import prod
from pathlib import Path as FilePath

import torch

from tdserve.errors import CorruptDataError
from tdserve.spec.torch_types import to_torch
from tdserve.spec.tree import Path, Spec, TensorLeaf
from tdserve.store.faults import os_faults
from tdserve.store.format import Folder, plan
from tdserve.store.mapped import Mapping, map_private, map_shared


def open_leaves(
    folder: str | os.PathLike[str], spec: Spec, *, writable: bool = True, is_private: bool = False
) -> dict[Path, torch.Tensor]:
    """Maps every tensor leaf of a store; each takes one of the 65,530 mappings that a process may have.

    No file is made, grown or followed through a symlink below ``folder``. Dropping the tensors unmaps the files.

    Args:
        folder: The store's folder, as given to :func:`tdserve.store.rows.create`.
        spec: The same structure.
        writable: False maps for reading: then a store into a tensor ends the process with SIGSEGV.
        is_private: Instead, what this process writes into the tensors stays its own, and reaches no file.

    Returns:
        The leaves in canonical order, in their stored shape. Leaves without elements are fresh empty tensors.

    Raises:
        CorruptDataError: A file is missing, is a symlink, or has another size.
        CapacityError: The process has too many mappings or files open.
    """
    base = FilePath(folder)
    found: dict[Path, torch.Tensor] = {}
    planned = plan(spec)
    mapped = _MAPPED[writable, is_private]
    with os_faults(base):
        base_fd = os.open(base, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            for top in filter(None, (planned.rows, planned.extra)):
                _open(top, base, base_fd, found, mapped)
        finally:
            os.close(base_fd)
    return {path: found[path] for path, _ in spec.tensors}


def leaf_view(buffer: torch.Tensor, offset: int, leaf: TensorLeaf) -> torch.Tensor:
    """The leaf that lies ``offset`` bytes into a uint8 buffer, which must be aligned for its dtype."""
    dtype = to_torch(leaf.dtype)
    if not prod(leaf.shape):
        return torch.empty(leaf.shape, dtype=dtype)
    return buffer[offset : offset + leaf.nbytes].view(dtype).view(leaf.shape)


def _private(fd: int, nbytes: int, path: FilePath) -> Mapping:
    return map_private(fd, nbytes, path=path)


def _shared(fd: int, nbytes: int, path: FilePath) -> Mapping:
    return map_shared(fd, nbytes, writable=True, path=path)


def _for_reading(fd: int, nbytes: int, path: FilePath) -> Mapping:
    return map_shared(fd, nbytes, writable=False, path=path)


_Map = Callable[[int, int, FilePath], Mapping]
_MAPPED: dict[tuple[bool, bool], tuple[int, _Map]] = {
    (True, False): (os.O_RDWR, _shared),
    (False, False): (os.O_RDONLY, _for_reading),
    (False, True): (os.O_RDONLY, _private),
}
"""By (writable, is_private): how a file is opened, and then mapped."""


def _open(
    folder: Folder, where: FilePath, parent_fd: int, found: dict[Path, torch.Tensor], mapped: tuple[int, _Map]
) -> None:
    where = where / folder.name
    with os_faults(where):
        fd = os.open(folder.name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=parent_fd)
    try:
        for name, path, leaf in folder.files:
            with os_faults(where / name, asked=leaf.nbytes):
                found[path] = _open_leaf(fd, name, where, leaf, *mapped)
        for child in folder.folders:
            _open(child, where, fd, found, mapped)
    finally:
        os.close(fd)


def _open_leaf(
    folder_fd: int, name: str, where: FilePath, leaf: TensorLeaf, access: int, map_file: _Map
) -> torch.Tensor:
    fd = os.open(name, access | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder_fd)
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode) or status.st_size != leaf.nbytes:
            expected, actual = f"a file of {leaf.nbytes} bytes", f"{status.st_size} bytes"
            raise CorruptDataError(path=str(where / name), expected=expected, actual=actual)
        if not leaf.nbytes:
            return torch.empty(leaf.shape, dtype=to_torch(leaf.dtype))
        mapping = map_file(fd, leaf.nbytes, where / name)
        return leaf_view(torch.frombuffer(mapping, dtype=torch.uint8), 0, leaf)
    finally:
        os.close(fd)
