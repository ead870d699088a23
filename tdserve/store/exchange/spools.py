"""Spool files: they hold values that are too many for a message, until the worker that writes values reads them.

A local client fills the one of its session; for a remote client, the worker that receives the values fills one of the
store's.

Pages are reused, so that writing values does not touch fresh ones. A worker reads the file and never maps it, since a
client may truncate it at any time.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from threading import Lock

from tdserve.base.errors import ConnectError, RemoteProtocolError
from tdserve.store.disk.faults import convert_os_errors
from tdserve.store.disk.files import write_at
from tdserve.values.value_columns import Buffer

_SUFFIX = ".values"

_STEP_BYTES = 1 << 16

_MAX_PARTS = 1024
"""IOV_MAX of Linux: the most buffers that one call writes."""


_FEW_BYTES = 256
"""Parts of up to about this size are copied together faster than the kernel gathers them."""


class Spool:
    """A client's end; created when it is first needed. Threads: safe.

    Args:
        folder: Folder of the sessions.
        lock_name: Name of the session's lock.
    """

    def __init__(self, folder: Path, lock_name: str) -> None:
        self._path = make_spool_path(folder, lock_name)
        self._lock = Lock()
        self._fd = -1
        self._is_closed = False
        self._end = 0
        self._free: dict[int, list[int]] = {}

    def put(self, parts: Sequence[Buffer], nbytes: int) -> tuple[int, int]:
        """Writes content, given in parts, into the file; returns its offset and size.

        Args:
            nbytes: Size of all parts together.

        Raises:
            CapacityError, InvalidRequestError: The file cannot be written.
            ConnectError: The session is over.
        """
        size = _find_size_class(nbytes)
        with self._lock:
            if self._is_closed:
                raise ConnectError(address=str(self._path), reason="the session is over")
            with convert_os_errors(self._path):
                if self._fd < 0:
                    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
                    self._fd = os.open(self._path, flags, 0o644)
                fd = os.dup(self._fd)  # another thread may close the file, and its number be reused
            places = self._free.get(size)
            offset = places.pop() if places else self._end
            self._end = max(self._end, offset + size)
        try:
            with convert_os_errors(self._path, asked=nbytes):
                _write(fd, parts, nbytes, offset)
        finally:
            os.close(fd)
        return offset, nbytes

    def free(self, offset: int, nbytes: int) -> None:
        """Frees content that is not needed any more."""
        with self._lock:
            self._free.setdefault(_find_size_class(nbytes), []).append(offset)

    def close(self) -> None:
        """Closes the file and removes it. Idempotent."""
        with self._lock:
            fd, self._fd, self._is_closed = self._fd, -1, True
        if fd >= 0:
            os.close(fd)
            self._path.unlink(missing_ok=True)


def _write(fd: int, parts: Sequence[Buffer], nbytes: int, offset: int) -> None:
    if nbytes <= _FEW_BYTES * len(parts):
        parts = [b"".join(parts)]
    written = 0
    for first in range(0, len(parts), _MAX_PARTS):
        written += os.pwritev(fd, parts[first : first + _MAX_PARTS], offset + written)
    if written < nbytes:  # a signal, or more than the kernel writes at once
        write_at(fd, b"".join(parts), offset)


def make_spool_path(folder: Path, lock_name: str) -> Path:
    """Returns the spool file that belongs to a session's lock."""
    return folder / f"{lock_name}{_SUFFIX}"


def remove_spool(path: str) -> None:
    """Removes a spool file, if it exists."""
    with convert_os_errors(Path(path)):
        Path(path).unlink(missing_ok=True)


def read_spooled(path: str, offset: int, nbytes: int) -> bytes:
    """Returns what a client has written into its spool file.

    Raises:
        RemoteProtocolError: It is not there.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        raise RemoteProtocolError(expected=f"values in {path}", received=error.strerror or str(error)) from error
    try:
        content = os.pread(fd, nbytes, offset)
    except (OSError, OverflowError, ValueError, MemoryError) as error:
        raise RemoteProtocolError(expected=f"{nbytes} bytes of values in {path}", received=str(error)) from error
    finally:
        os.close(fd)
    if len(content) != nbytes:
        raise RemoteProtocolError(expected=f"{nbytes} bytes of values in {path}", received=f"{len(content)}")
    return content


class SpoolWriter:
    """A worker's end of a file that holds one block of values of a remote client; each block overwrites the previous
    one.

    Args:
        path: The file; its folder is created if it is missing, but not the one above it: that of a deleted store would
            come again.

    Raises:
        CapacityError, InvalidRequestError: It cannot be created.
    """

    def __init__(self, path: str) -> None:
        self._path = Path(path)
        with convert_os_errors(self._path):
            self._path.parent.mkdir(exist_ok=True)
            self._fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)

    def write(self, offset: int, content: memoryview) -> None:
        """Writes a piece of the block at its place.

        Raises:
            CapacityError: The disk is full.
        """
        with convert_os_errors(self._path, asked=len(content)):
            write_at(self._fd, content, offset)

    def __enter__(self) -> SpoolWriter:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._fd)


def _find_size_class(nbytes: int) -> int:
    return max(_STEP_BYTES, 1 << (nbytes - 1).bit_length())
