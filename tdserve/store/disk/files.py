"""Syncs and replaces files, and reserves their room."""

from __future__ import annotations

import ctypes
import errno
import os
from pathlib import Path

from tdserve.store.disk.faults import convert_os_errors

_KEEP_SIZE = 1
"""FALLOC_FL_KEEP_SIZE of Linux."""

_AT_FDCWD, _RENAME_EXCHANGE = -100, 2
"""Arguments of renameat2(2)."""

_BLOCK_BYTES = 512
"""Unit of ``st_blocks``."""

_IN_MEMORY = ("tmpfs ", "ramfs ")

FRESH_SUFFIX = ".new"
"""End of the name of a file that is written, and then takes the place of another."""

SET_ASIDE = ".lost-"
"""Begin of the names of folders of stores that no catalog has."""


def sync_file(path: Path) -> None:
    """Syncs a file's content, or a folder's names, to the disk, including what others wrote through mappings."""
    with convert_os_errors(path):
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


def replace_file(path: Path, content: bytes, *, must_sync: bool = False) -> None:
    """Replaces a file by a new one with a rename: a concurrent reader sees the old content or the new one.

    Args:
        path: The file.
        content: All of it. On a full disk it can be replaced only by content of the same length.
        must_sync: Whether the content is on the disk before it is at its path; the folder is not synced.

    Raises:
        OSError: There is no room. The file is as before.
    """
    fresh = path.with_name(path.name + FRESH_SUFFIX)
    try:
        fresh.write_bytes(content)
    except OSError:
        fresh.unlink(missing_ok=True)
        if not path.exists() or path.stat().st_size != len(content):
            raise
        with path.open("r+b") as file:  # a full disk has room for content of the same length
            file.write(content)
        fresh = path
    if must_sync:
        sync_file(fresh)
    if fresh != path:
        os.replace(fresh, path)


def exchange_paths(path: Path, other: Path) -> bool:
    """Lets two files or folders of one file system take each other's place in one step; returns False, with nothing
    done, if that cannot be done: by this kernel or file system, or to these paths, which renames then say."""
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if rename is None:
        return False
    return not rename(_AT_FDCWD, os.fsencode(path), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE)


def write_at(fd: int, content: bytes | bytearray | memoryview, offset: int) -> None:
    """Writes all of a content at its place. The kernel may write less at a time: at a signal, or on a disk that gets
    full, where only the next attempt fails.

    Raises:
        OSError: There is no room for all of it.
    """
    left = memoryview(content).cast("B")
    while left:
        written = os.pwrite(fd, left, offset)
        left, offset = left[written:], offset + written


def is_in_memory(path: Path) -> bool:
    """Returns whether a folder is on a file system without a disk, so that its content does not survive a reboot."""
    try:
        device = os.stat(path).st_dev
        lines = Path("/proc/self/mountinfo").read_text(errors="surrogateescape").splitlines()
    except OSError:
        return False
    number = f"{os.major(device)}:{os.minor(device)}"
    return any(line.split()[2] == number and line.partition(" - ")[2].startswith(_IN_MEMORY) for line in lines)


def reserve_blocks(fd: int, nbytes: int) -> None:
    """Reserves the room of a file that another process has made and may be writing: its content and size stay.

    Does nothing where the file system cannot do that. ``os.posix_fallocate`` writes into each block there, and so over
    what others write.

    Raises:
        OSError: There is no room.
    """
    if os.fstat(fd).st_blocks * _BLOCK_BYTES >= nbytes:
        return
    fallocate = ctypes.CDLL(None, use_errno=True).fallocate
    fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)  # off_t of every 64-bit Linux
    while fallocate(fd, _KEEP_SIZE, 0, nbytes):
        number = ctypes.get_errno()
        if number in (errno.EOPNOTSUPP, errno.ENOSYS):
            return
        if number != errno.EINTR:
            fault = OSError(number, os.strerror(number))
            raise fault
