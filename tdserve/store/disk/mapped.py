"""Shared mappings of files that keep no file descriptor open. No torch, no numpy.

Python's ``mmap`` object keeps a duplicate of the descriptor until 3.13, so 10,000 mapped leaves would need 10,000
descriptors, where a process usually may have 1,024. This module calls the C library instead. The pages are unmapped
with the last object that views them, never earlier, so no view can outlive its pages.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref
from collections.abc import Collection
from functools import lru_cache
from pathlib import Path
from typing import Any

from tdserve.store.disk.faults import convert_os_error, convert_os_errors

_MAP_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)
"""Linux's flag; Python has it from 3.11 on. It avoids reserving memory for pages that are hardly ever written."""

_MAP_FIXED = 0x10
"""Linux's flag, on every processor but Alpha and PA-RISC: the mapping replaces the one that is there."""

Mapping = Any
"""A ctypes array over the mapped bytes: numpy and torch use it by the buffer protocol. It always looks writable, but
writing into one that was mapped for reading ends the process; so callers mark their views read-only where they can."""


def map_shared(fd: int, nbytes: int, *, writable: bool, path: Path) -> Mapping:
    """Maps the first ``nbytes`` of an open file, shared with every other process that maps it.

    Args:
        fd: May be closed afterwards.
        nbytes: At least 1 and at most the file's size, which the caller checks: a page behind the end kills with
            SIGBUS.
        writable: Whether stores into the mapping are allowed (and reach the file).
        path: Path of the file, for the message.

    Raises:
        CapacityError: ``vm.max_map_count`` mappings (usually 65,530) exist, or no address space is left.
        InvalidRequestError: The file was opened in another mode.
    """
    return _map(fd, nbytes, mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0), mmap.MAP_SHARED, path)


def map_new(fd: int, nbytes: int, *, path: Path) -> Mapping:
    """Maps a new file for writing, shared with every other process that maps it.

    Its pages are made one at a time when they are first touched. The kernel would read ahead otherwise, and fill
    megabytes with zeros at once: 8 MB where that is the device's setting, in 18 ms (measured). Arguments and errors as
    in :func:`map_shared`.
    """
    mapping = map_shared(fd, nbytes, writable=True, path=path)
    _load_libc().madvise(
        ctypes.addressof(mapping), nbytes, mmap.MADV_RANDOM
    )  # whatever it answers, the mapping is right
    return mapping


def map_private(fd: int, nbytes: int, *, path: Path) -> Mapping:
    """Maps an open file so that writes do not change it.

    Pages that this process does not write are shared, and show what others write; a page that it writes becomes
    private. Arguments and errors as in :func:`map_shared`.
    """
    return _map(fd, nbytes, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE | _MAP_NORESERVE, path)


def make_private(files: Collection[tuple[str, int]]) -> None:
    """Replaces this process's shared mappings of some files by private copies of their present content, at the same
    addresses.

    Args:
        files: Resolved path and inode of each.

    Raises:
        TDServeError: The kernel does not list the mappings, or cannot make one.
    """
    if not files:
        return
    paths, inodes = {path for path, _ in files}, {(os.path.basename(path), inode) for path, inode in files}
    maps = Path("/proc/self/maps")
    with convert_os_errors(maps):
        lines = maps.read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    for line in lines:
        span, permissions, _, _, inode, *rest = line.split(None, 5)
        path = rest[0].removesuffix(" (deleted)") if rest else ""
        if permissions[3] == "s" and (path in paths or (os.path.basename(path), int(inode)) in inodes):
            begin, end = (int(place, 16) for place in span.split("-"))
            _replace_by_copy(begin, end - begin)


def _replace_by_copy(address: int, nbytes: int) -> None:
    content = ctypes.string_at(address, nbytes)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_FIXED
    if _load_libc().mmap(address, nbytes, mmap.PROT_READ | mmap.PROT_WRITE, flags, -1, 0) != address:
        code = ctypes.get_errno()
        raise convert_os_error(OSError(code, os.strerror(code)), Path("/proc/self/maps"), asked=nbytes)
    ctypes.memmove(address, content, nbytes)


def _map(fd: int, nbytes: int, protection: int, flags: int, path: Path) -> Mapping:
    libc = _load_libc()
    address = libc.mmap(None, nbytes, protection, flags, fd, 0)
    if address is None or address == ctypes.c_void_p(-1).value:
        code = ctypes.get_errno()
        raise convert_os_error(OSError(code, os.strerror(code)), path, asked=nbytes)
    mapping = (ctypes.c_char * nbytes).from_address(address)
    unmap = weakref.finalize(mapping, libc.munmap, address, nbytes)
    unmap.atexit = False  # at exit other threads may still touch the pages; the kernel unmaps them
    return mapping


@lru_cache(maxsize=1)
def _load_libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = (
        ctypes.c_void_p,
        ctypes.c_size_t,
        ctypes.c_int,
        ctypes.c_int,
        ctypes.c_int,
        ctypes.c_int64,  # off_t of every 64-bit Linux
    )
    libc.madvise.restype = ctypes.c_int
    libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    libc.munmap.restype = ctypes.c_int
    libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
    return libc
