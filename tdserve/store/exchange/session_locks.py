"""Lock files of local sessions: a client holds its lock as long as it may write into mapped rows, whatever happens to
it.

A ``flock`` belongs to the open file. It ends when the process has ended in any way, but not while it is stopped, and it
outlives a restart of the server. Time proves nothing.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
from pathlib import Path

from tdserve.base.errors import ConnectError
from tdserve.store.disk.faults import convert_os_errors
from tdserve.store.exchange.spools import make_spool_path


class SessionLock:
    """A session's lock, held by this process until :meth:`release`. Build it with :meth:`hold`."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    @classmethod
    def hold(cls, folder: Path, name: str) -> SessionLock | None:
        """Creates and locks the file ``name``; None if this process may not write in the folder.

        Raises:
            ConnectError: The folder is gone, or another process has the file.
        """
        path = folder / name
        try:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
        except OSError as error:
            if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
                return None
            raise ConnectError(address=str(path), reason=error.strerror or str(error)) from error
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(fd)
            raise ConnectError(address=str(path), reason=error.strerror or str(error)) from error
        return cls(fd)

    def release(self) -> None:
        """Releases the lock: nothing more will be written. Idempotent."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


def is_held(folder: Path, name: str) -> bool:
    """Returns whether the process of a session may still write. A missing file counts as not held.

    Raises:
        CorruptDataError, InvalidRequestError: The file cannot be checked.
    """
    path = folder / name
    with convert_os_errors(path):
        try:
            fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)  # it may belong to another user
        except FileNotFoundError:
            return False
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            os.close(fd)
    return False


def remove(folder: Path, name: str) -> None:
    """Removes the files of a session that has ended."""
    for path in (folder / name, make_spool_path(folder, name)):
        with contextlib.suppress(OSError):
            os.unlink(path)
