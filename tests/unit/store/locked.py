"""A check whether readers hold a lock on a file."""

from __future__ import annotations

from pathlib import Path

from tdserve.store.weights.version_locks import lock_exclusively


def is_locked(path: Path) -> bool:
    """Returns whether a reader holds a lock on the file."""
    with path.open("r+b") as file:
        try:
            lock_exclusively(file.fileno())
        except BlockingIOError:
            return True
    return False
