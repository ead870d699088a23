"""Root folders of servers that many tests share."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

MEMORY = Path("/dev/shm")

MIN_BYTES = 8 << 30
"""Roots are in memory only if it has this much room: those of a whole run take 3 GB."""


_PREFIX = "tdserve-root-"
"""The names of roots begin so; the id of the process of the tests follows."""


@contextmanager
def make_quick_root() -> Iterator[Path]:
    """Makes a folder for tests that do not examine what survives: in memory if there is room.

    On a disk, files take a fifth of the time of such tests. Servers that are killed, or whose files are examined, have
    their roots in pytest's folders, on the disk.
    """
    has_room = MEMORY.is_dir() and min(shutil.disk_usage(MEMORY).free, _count_available_bytes()) >= MIN_BYTES
    if has_room:
        _remove_left()
    with TemporaryDirectory(prefix=f"{_PREFIX}{os.getpid()}-", dir=MEMORY if has_room else None) as folder:
        yield Path(folder)


def _remove_left() -> None:
    """Removes the roots in memory of runs that were killed. Otherwise they would stay until the machine restarts."""
    for folder in MEMORY.glob(f"{_PREFIX}*-*"):
        pid = folder.name.removeprefix(_PREFIX).partition("-")[0]
        if pid.isdecimal() and not Path("/proc", pid).exists():
            shutil.rmtree(folder, ignore_errors=True)


def _count_available_bytes() -> int:
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable"))
