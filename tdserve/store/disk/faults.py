"""The only table that maps faults of the operating system and of LMDB to errors of tdserve."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path

import lmdb

from tdserve.base.errors import (
    CapacityError,
    CorruptDataError,
    InvalidRequestError,
    LocalProtocolError,
    NotSupportedError,
    TDServeError,
)

NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.ENOMEM, errno.EMFILE, errno.ENFILE, errno.EFBIG}
"""EFBIG: a file beyond the limit of the file system or process. ENOMEM from mmap: ``vm.max_map_count`` is reached."""

_NEARLY_FULL_BYTES = 1 << 20
"""Free space below which an input/output error of a write counts as a full disk."""

_NOT_ALLOWED = {errno.EACCES, errno.EPERM, errno.EROFS}

_LMDB_FULL = (lmdb.MapFullError, lmdb.DiskError, lmdb.TxnFullError, lmdb.ReadersFullError, lmdb.MemoryError)
_LMDB_MISUSED = (lmdb.BadValsizeError, lmdb.InvalidParameterError, lmdb.DbsFullError)


def free_bytes(path: Path) -> int:
    """Returns how many bytes this process may still write to the file system of ``path`` (or its nearest ancestor)."""
    for folder in (path, *path.parents):
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):  # ask the next ancestor
            found = os.statvfs(folder)
            return found.f_bavail * found.f_frsize
    return 0


def convert_os_error(fault: OSError, path: Path, *, asked: int = 0) -> TDServeError:
    """Returns the error for ``fault``: no room, not allowed, or damaged.

    Args:
        fault: The fault of the operating system.
        path: The file or folder that was being used.
        asked: Bytes to be reserved or written; 0 if the call asked for none.
    """
    reason = fault.strerror or str(fault)
    if fault.errno in NO_ROOM:
        return CapacityError(what=f"{path} ({reason})", asked=asked, free=free_bytes(path))
    if fault.errno in _NOT_ALLOWED:
        return InvalidRequestError(argument=f"path {path}", reason=reason)
    return CorruptDataError(path=str(path), expected="a usable file or folder", actual=reason)


@contextlib.contextmanager
def convert_os_errors(path: Path, *, asked: int = 0) -> Iterator[None]:
    """Turns every ``OSError`` of the block into an error of tdserve that names ``path``."""
    try:
        yield
    except OSError as fault:
        raise convert_os_error(fault, path, asked=asked) from fault


class lmdb_faults:  # noqa: N801 (used as a function; a generator in its place costs more than what LMDB does)
    """A block that turns every ``lmdb.Error`` into an error of tdserve that names ``folder``.

    Args:
        folder: Folder of the environment.
        max_bytes: Size of its map, for the message if that is full.
        asked: Bytes that the block adds.
    """

    __slots__ = ("_asked", "_folder", "_max_bytes")

    def __init__(self, folder: Path, *, max_bytes: int, asked: int = 0) -> None:
        self._folder = folder
        self._max_bytes = max_bytes
        self._asked = asked

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, fault: BaseException | None, trace: object) -> None:
        if isinstance(fault, (lmdb.Error, OSError)):
            raise _convert_error(fault, self._folder, self._max_bytes, self._asked) from fault


def _convert_error(fault: lmdb.Error | OSError, folder: Path, max_bytes: int, asked: int) -> TDServeError:
    if isinstance(fault, _LMDB_FULL):
        free = min(free_bytes(folder), max_bytes)
        return CapacityError(what=f"{folder} ({fault}; its map has {max_bytes} bytes)", asked=asked, free=free)
    if isinstance(fault, lmdb.ReadonlyError):
        return NotSupportedError(feature=f"writing to {folder} from this process", reason=str(fault))
    if isinstance(fault, _LMDB_MISUSED):
        return LocalProtocolError(reason=f"{folder}: {fault}")
    if isinstance(fault, lmdb.Error):
        return _convert_lmdb_error(fault, folder, asked=asked)
    return convert_os_error(fault, folder, asked=asked)


def _convert_lmdb_error(fault: lmdb.Error, folder: Path, *, asked: int) -> TDServeError:
    # lmdb raises its base class with the text of strerror() for every errno that has no class of its own
    text = str(fault)
    for code in sorted(NO_ROOM | _NOT_ALLOWED):
        if text.endswith(os.strerror(code)):
            return convert_os_error(OSError(code, os.strerror(code)), folder, asked=asked)
    free = free_bytes(folder)
    if text.endswith(os.strerror(errno.EIO)) and free < max(asked, _NEARLY_FULL_BYTES):
        # A value of many pages fills the disk in the middle of one write; LMDB calls every short write EIO (measured).
        return CapacityError(what=f"{folder} ({text})", asked=asked, free=free)
    return CorruptDataError(path=str(folder), expected="an LMDB environment", actual=text)
