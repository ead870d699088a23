"""Whether a file is held by a lock of its readers."""

from __future__ import annotations

import fcntl
from pathlib import Path


def is_locked(path: Path) -> bool:
    """Whether somebody reads the file."""
    with path.open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False
