"""Memory, descriptors and threads of processes, and the disk of a root, as /proc and the file system show them."""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

BLOCK_NBYTES = 512
"""Unit of ``st_blocks``."""


class ProcessFigures(NamedTuple):
    """What one process, or several together, use.

    Attributes:
        memory_nbytes: Resident memory. A page that several processes share counts in each: a forked process makes pages
            its own by and by, and its share of others changes when one that shares them ends, which is no growth.
        anonymous_nbytes: Its part that belongs to no file: heaps and stacks.
        shared_nbytes: Shared memory; each page counts by its share.
        num_descriptors: Open descriptors.
        num_threads: Threads.
    """

    memory_nbytes: int
    anonymous_nbytes: int
    shared_nbytes: int
    num_descriptors: int
    num_threads: int


def measure_processes(pids: Iterable[int]) -> ProcessFigures | None:
    """Returns the sums over some processes; None if there are none, or one has ended."""
    found = []
    for pid in pids:
        try:
            found.append(_measure_process(pid))
        except (OSError, KeyError):  # ended, or ending
            return None
    return ProcessFigures(*map(sum, zip(*found, strict=True))) if found else None


def _measure_process(pid: int) -> ProcessFigures:
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]
    nbytes = {name: 1024 * int(rest.split()[0]) for name, _, rest in (line.partition(":") for line in lines)}
    num_descriptors, num_threads = (len(os.listdir(f"/proc/{pid}/{folder}")) for folder in ("fd", "task"))
    return ProcessFigures(nbytes["Rss"], nbytes["Anonymous"], nbytes["Pss_Shmem"], num_descriptors, num_threads)


def measure_disk(root: Path) -> tuple[int, int]:
    """Returns how many bytes the files below a folder occupy, and the number of files."""
    total = num_files = 0
    for folder, _, files in os.walk(root):
        for file in files:
            with suppress(OSError):  # deleted since
                total += BLOCK_NBYTES * os.lstat(os.path.join(folder, file)).st_blocks
                num_files += 1
    return total, num_files


def list_descendants(pid: int) -> list[int]:
    """Lists the processes below a process."""
    parents: dict[int, list[int]] = {}
    for folder in os.listdir("/proc"):
        if folder.isdecimal():
            with suppress(OSError):
                parents.setdefault(find_parent(int(folder)), []).append(int(folder))
    found, waiting = [], [pid]
    while waiting:
        children = parents.get(waiting.pop(), [])
        found += children
        waiting += children
    return found


def find_parent(pid: int) -> int:
    """Returns the parent of a process. Raises OSError if there is no such process."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def is_gone(pid: int) -> bool:
    """Returns whether a process has ended, reaped or not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in ("Z", "X")
    except OSError:
        return True
