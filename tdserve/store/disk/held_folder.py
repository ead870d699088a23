"""A folder that stays the same one while a process works in it, whatever becomes of its name."""

from __future__ import annotations

import os
import weakref
from pathlib import Path

from tdserve.store.disk.faults import convert_os_errors


class HeldFolder:
    """A folder by its descriptor: work in it goes on in the same folder if that is moved away and another one gets its
    name.

    Attributes:
        path: Leads to it in this process as long as this object lives. It is no name to show.
    """

    def __init__(self, folder: Path) -> None:
        """Opens a folder by its name of now.

        Raises:
            CorruptDataError, CapacityError: It is not there, or there are too many descriptors.
        """
        with convert_os_errors(folder):
            fd = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        self.path = Path(f"/proc/self/fd/{fd}")
        weakref.finalize(self, os.close, fd).atexit = False


def find_name(path: Path) -> Path:
    """Returns the name that a folder has now, to show it; ``path`` may be that of a held one."""
    return Path(os.path.realpath(path))
