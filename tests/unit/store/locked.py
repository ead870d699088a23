"""A check whether readers hold a lock on a file."""

from __future__ import annotations

import fcntl
from pathlib import Path


def is_locked(path: Path) -> bool:
    """Returns whether a reader holds a lock on the file."""
    with path.open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False
