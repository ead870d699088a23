"""Creates the folders of a store's tensor leaves, and reserves their space. No torch: control does this.

:mod:`tdserve.store.rows.mapping` opens them.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path as FilePath
from types import MappingProxyType

from tdserve.base.errors import CapacityError
from tdserve.base.failpoints import reach
from tdserve.store.disk.faults import convert_os_errors, free_bytes
from tdserve.store.disk.held_folder import find_name
from tdserve.store.rows.format import Folder, plan
from tdserve.structure.trees.tree import Path, Spec


def create(
    folder: str | os.PathLike[str], spec: Spec, contents: Mapping[Path, bytes] = MappingProxyType({})
) -> list[Path]:
    """Creates ``<folder>/rows`` and, if needed, ``<folder>/extra``: every leaf is zero, its space reserved.

    On tmpfs reserving takes 0.4 s per GiB, so a server does this off its event loop. 10,000 leaves take about 0.5 s.

    Args:
        folder: The store's folder; created if it is missing, but not the one above it: that of a deleted store would
            come again. It must have neither ``rows`` nor ``extra`` yet.
        spec: Complete structure of what is stored, including its row dimension.
        contents: Bytes of the leaves that are not zero.

    Returns:
        Paths of the leaves in ``extra``, which ``TensorDict.load_memmap`` will not show.

    Raises:
        CapacityError: The disk is full. Nothing remains.
        CorruptDataError, InvalidRequestError: The folder cannot be used. Nothing remains.
    """
    base = FilePath(folder)
    free = free_bytes(base)
    if spec.nbytes > free:
        raise CapacityError(what=f"{find_name(base)}", asked=spec.nbytes, free=free)
    planned = plan(spec)
    made: list[str] = []
    was_there = base.exists()
    try:
        with convert_os_errors(find_name(base), asked=spec.nbytes):
            base.mkdir(exist_ok=True)
            base_fd = os.open(base, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                for top in filter(None, (planned.rows, planned.extra)):
                    _make(top, base_fd, contents, made)
            finally:
                os.close(base_fd)
    except BaseException:
        for name in made:
            shutil.rmtree(base / name, ignore_errors=True)
        if not was_there:
            shutil.rmtree(base, ignore_errors=True)
        raise
    return list(planned.extra_paths)


def find_extra_paths(spec: Spec) -> tuple[Path, ...]:
    """Returns the leaves of a structure that ``TensorDict.load_memmap`` does not show."""
    return plan(spec).extra_paths


def _make(folder: Folder, parent_fd: int, contents: Mapping[Path, bytes], made: list[str] | None = None) -> None:
    os.mkdir(folder.name, dir_fd=parent_fd)
    if made is not None:
        made.append(folder.name)
    fd = os.open(folder.name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=parent_fd)
    try:
        for name, path, leaf in folder.files:
            _make_file(fd, name, nbytes=leaf.nbytes, text=contents.get(path, b""))
        for name, text in folder.texts:
            _make_file(fd, name, text=text)
        for child in folder.folders:
            _make(child, fd, contents)
    finally:
        os.close(fd)


def _make_file(folder_fd: int, name: str, *, nbytes: int = 0, text: bytes = b"") -> None:
    fd = os.open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666, dir_fd=folder_fd)
    try:
        if nbytes:  # a file of zero bytes stays: tensordict reads it as a tensor without elements
            os.posix_fallocate(fd, 0, nbytes)
            reach("files.made")
        while text:
            text = text[os.write(fd, text) :]
    finally:
        os.close(fd)
