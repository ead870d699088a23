"""Syncs files to the disk."""

from __future__ import annotations

import os
from pathlib import Path

from tdserve.store.faults import convert_os_errors

_IN_MEMORY = ("tmpfs ", "ramfs ")


def sync_file(path: Path) -> None:
    """Syncs a file's content, or a folder's names, to the disk, including what others wrote through mappings."""
    with convert_os_errors(path):
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


def is_in_memory(path: Path) -> bool:
    """Returns whether a folder is on a file system without a disk, so that its content does not survive a reboot."""
    try:
        device = os.stat(path).st_dev
        lines = Path("/proc/self/mountinfo").read_text(errors="surrogateescape").splitlines()
    except OSError:
        return False
    number = f"{os.major(device)}:{os.minor(device)}"
    return any(line.split()[2] == number and line.partition(" - ")[2].startswith(_IN_MEMORY) for line in lines)
