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

from tdserve.base.errors import CorruptDataError, ReadOnlyError
from tdserve.rules.catalog import explain_read_only
from tdserve.store.disk.faults import convert_os_errors
from tdserve.store.disk.mapped import Mapping, map_private, map_shared
from tdserve.store.rows.adoptable import check_size
from tdserve.store.rows.adopted import Adopted
from tdserve.store.rows.format import Folder, plan
from tdserve.store.rows.shown_memory import note_shown
from tdserve.structure.tensors.torch_types import to_torch
from tdserve.structure.trees.tree import Path, Spec, TensorLeaf, quote


def open_leaves(
    folder: str | os.PathLike[str],
    spec: Spec,
    *,
    writable: bool = True,
    is_private: bool = False,
    is_shown: bool = False,
) -> dict[Path, torch.Tensor]:
    """Maps every tensor leaf of a store; each takes one of the 65,530 mappings that a process may have.

    This creates and grows no file, and follows no symlink below ``folder``. Dropping the tensors unmaps the files. The
    leaves of an adopted store lie in the user's folder, in files that may be longer than their content.

    Args:
        folder: The store's folder, as given to :func:`tdserve.store.rows.leaf_folders.create`.
        spec: The structure that was given to it.
        writable: False maps for reading: then a store into a tensor ends the process with SIGSEGV.
        is_private: Writes of this process into the tensors stay private, and reach no file.
        is_shown: Whether a user gets the tensors, and may write them into the store that they show.

    Returns:
        The leaves in canonical order, in their stored shape. Leaves without elements are fresh empty tensors.

    Raises:
        CorruptDataError: A file is missing, is a symlink, or has another size.
        CapacityError: The process has too many mappings or files open.
        ReadOnlyError: It was adopted read-only, and ``writable`` is set.
    """
    base = FilePath(folder)
    found: dict[Path, torch.Tensor] = {}
    adopted = Adopted.load(base)
    if adopted is None:
        planned = plan(spec)
        tops = [top for top in (planned.rows, planned.extra) if top is not None]
    else:
        tops = [adopted.plan(spec)]
        if writable and adopted.read_only:
            raise ReadOnlyError(store=base.name, reason=explain_read_only(adopted.path))
    access, map_file = _MAPPED[writable, is_private]
    mapped = access, _note_shown(map_file) if is_shown else map_file
    check = _check_exact if adopted is None else check_size
    where = base if adopted is None else FilePath(adopted.path)
    # The first to map them may be in inference mode; tensors made there could only be written there.
    with convert_os_errors(where), torch.inference_mode(False):
        base_fd = os.open(base, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC) if adopted is None else adopted.open()
        try:
            for top in tops:
                _open(top, where, base_fd, found, (*mapped, check))
        finally:
            os.close(base_fd)
        if adopted is not None:
            _add_empty(found, spec, base)
    return {path: found[path] for path, _ in spec.tensors}


def view_leaf(buffer: torch.Tensor, offset: int, leaf: TensorLeaf) -> torch.Tensor:
    """Returns the leaf at ``offset`` in a uint8 buffer, which must be aligned for its dtype."""
    dtype = to_torch(leaf.dtype)
    if not prod(leaf.shape):
        return make_empty_leaf(leaf)
    return buffer[offset : offset + leaf.nbytes].view(dtype).view(leaf.shape)


def _add_empty(found: dict[Path, torch.Tensor], spec: Spec, base: FilePath) -> None:
    """Adds the leaves without elements, for which tensordict creates no file."""
    for path, leaf in spec.tensors:
        if path not in found and leaf.nbytes:
            raise CorruptDataError(path=str(base), expected=f"a file of leaf {quote(path)}", actual="none")
        found.setdefault(path, make_empty_leaf(leaf))


def make_empty_leaf(leaf: TensorLeaf) -> torch.Tensor:
    """Returns a leaf without elements, which no file holds."""
    return torch.empty(leaf.shape, dtype=to_torch(leaf.dtype), device="cpu")


def _note_shown(map_file: _Map) -> _Map:
    def map_shown(fd: int, nbytes: int, path: FilePath) -> Mapping:
        mapping = map_file(fd, nbytes, path)
        note_shown(mapping)
        return mapping

    return map_shown


def _map_private(fd: int, nbytes: int, path: FilePath) -> Mapping:
    return map_private(fd, nbytes, path=path)


def _map_shared(fd: int, nbytes: int, path: FilePath) -> Mapping:
    return map_shared(fd, nbytes, writable=True, path=path)


def _map_for_reading(fd: int, nbytes: int, path: FilePath) -> Mapping:
    return map_shared(fd, nbytes, writable=False, path=path)


_Map = Callable[[int, int, FilePath], Mapping]
_MAPPED: dict[tuple[bool, bool], tuple[int, _Map]] = {
    (True, False): (os.O_RDWR, _map_shared),
    (False, False): (os.O_RDONLY, _map_for_reading),
    (False, True): (os.O_RDONLY, _map_private),
}
"""How a file is opened and mapped, by (writable, is_private)."""

_Check = Callable[[int, FilePath, Path, TensorLeaf], None]


def _open(
    folder: Folder, where: FilePath, parent_fd: int, found: dict[Path, torch.Tensor], mapped: tuple[int, _Map, _Check]
) -> None:
    where = where / folder.name
    with convert_os_errors(where):
        fd = os.open(folder.name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=parent_fd)
    try:
        for name, path, leaf in folder.files:
            with convert_os_errors(where / name, asked=leaf.nbytes):
                found[path] = _open_leaf(fd, where / name, path, leaf, *mapped)
        for child in folder.folders:
            _open(child, where, fd, found, mapped)
    finally:
        os.close(fd)


def _open_leaf(
    folder_fd: int, file: FilePath, path: Path, leaf: TensorLeaf, access: int, map_file: _Map, check: _Check
) -> torch.Tensor:
    fd = os.open(file.name, access | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder_fd)
    try:
        check(fd, file, path, leaf)
        if not leaf.nbytes:
            return make_empty_leaf(leaf)
        mapping = map_file(fd, leaf.nbytes, file)
        return view_leaf(torch.frombuffer(mapping, dtype=torch.uint8), 0, leaf)
    finally:
        os.close(fd)


def _check_exact(fd: int, file: FilePath, path: Path, leaf: TensorLeaf) -> None:
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode) or status.st_size != leaf.nbytes:
        expected, actual = f"a file of {leaf.nbytes} bytes", f"{status.st_size} bytes"
        raise CorruptDataError(path=str(file), expected=expected, actual=actual)
