"""Locks of version files, which readers and writers of several processes hold.

A lock belongs to the open file (``fcntl(2)``, "open file description locks") and ends with it, like one of ``flock``.
An exclusive lock needs write access, so another user's reader cannot block readers.
"""

from __future__ import annotations

import fcntl
import os
import struct

_FLOCK = struct.Struct("hhqqi")
"""Type, origin, start, length and process of ``struct flock``: zeros lock the whole file."""


def lock_shared(fd: int) -> None:
    """Locks a file that is open for reading. Raises BlockingIOError if a writer has locked it."""
    _lock(fd, fcntl.F_RDLCK)


def lock_exclusively(fd: int) -> None:
    """Locks a file that is open for writing. Raises BlockingIOError if another one has locked it."""
    _lock(fd, fcntl.F_WRLCK)


def unlock(fd: int) -> None:
    """Ends the lock."""
    _lock(fd, fcntl.F_UNLCK)


def _lock(fd: int, kind: int) -> None:
    try:
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _FLOCK.pack(kind, os.SEEK_SET, 0, 0, 0))
    except PermissionError as error:  # as the standard allows for a lock of others
        raise BlockingIOError(*error.args) from error
