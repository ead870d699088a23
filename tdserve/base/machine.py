"""The machine that this process runs on: what two processes can compare of it, and its memory."""

from __future__ import annotations

import ctypes
import os
import resource
import signal
from contextlib import suppress

KEPT_BYTES = 64 * 1024 * 1024
"""Freed memory that a process of the server keeps at the end of its heap."""

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
"""Of mallopt(3)."""

_PR_SET_PDEATHSIG = 1
"""Of prctl(2): the signal that this process gets when the thread that started it ends."""

_PR_SET_THP_DISABLE = 41
"""The same: whether it gets its memory by small pages alone."""

EXIT_NO_DESCRIPTORS = 75
"""Exit code of a data worker that had none left; EX_TEMPFAIL of sysexits.h."""

MAX_DESCRIPTORS = 1 << 20
"""More are of no use, and some systems allow a thousand times as many, which programs that go through all do not
survive."""

OOM_COUNTERS = ("/proc/vmstat", "/sys/fs/cgroup/memory.events")
"""Where the kernel tells how many processes it has ended for want of memory."""

_ORDERED_MACHINES = ("x86_64", "amd64")


def boot_id() -> str:
    """Equal in two processes of one running kernel, also in different containers; ``""`` where there is none."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return file.read().strip()
    except OSError:
        return ""


def why_not_shared(machine: str) -> str:
    """Why two processes of such a machine may not read rows that the other one writes; "" where they may.

    A reader copies a row between two looks at its generation. That finds every write under way only where processors
    keep loads in order, and stores too, which those of x86-64 do. Others need a fence, which Python does not have.

    Args:
        machine: Name of the processor's kind, as of ``platform.machine()``.
    """
    if machine.lower() in _ORDERED_MACHINES:
        return ""
    return f"this machine is {machine or 'of a kind that cannot be told'}; rows are shared in memory on x86-64 only"


def pid_namespace() -> str:
    """Equal in two processes that see each other's process ids; ``""`` where it cannot be told."""
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


def keep_freed_memory() -> None:
    """Lets this process keep what it frees, up to 64 MiB, instead of giving every message's pages back to the kernel.

    The first touch of a page costs more than copying into it: reading blocks of values of half a megabyte takes half
    the time with this (measured). Does nothing where the C library has no such setting.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_TRIM_THRESHOLD, KEPT_BYTES)
        mallopt(_M_MMAP_THRESHOLD, KEPT_BYTES // 2)


def use_small_pages(is_small: bool = True) -> None:
    """Has this process, and those that it starts, get memory by pages of 4 KiB, never by 2 MiB at once.

    NumPy asks for large pages wherever an array has 4 MiB. To be given one takes up to 10 ms in a virtual machine: an
    event loop would spend them on the first row of each 2 MiB of a table; what is done with the rows later takes as
    long with either (measured). Does nothing where the kernel has no such setting.

    Args:
        is_small: False undoes it.
    """
    ctypes.CDLL(None).prctl(_PR_SET_THP_DISABLE, int(is_small), 0, 0, 0)


def die_with_parent() -> None:
    """Has the kernel kill this process when the thread that started it ends, however that ends.

    Also where this process is stopped, or hangs where it cannot see that a socket was closed. What it forks has to ask
    for itself.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def count_oom_kills() -> int:
    """How many processes the kernel has ended for want of memory, here or in this container; 0 where it does not say.

    Two counts tell whether it did between them.
    """
    return sum(map(_read_oom_kills, OOM_COUNTERS))


def _read_oom_kills(path: str) -> int:
    try:
        with open(path, encoding="ascii") as file:
            return sum(int(line.split()[1]) for line in file if line.startswith("oom_kill "))
    except OSError:
        return 0


def raise_descriptor_limit() -> int:
    """Lets this process, and those that it starts, have as many descriptors as it may; returns how many."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, MAX_DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with suppress(OSError, ValueError):  # a sandbox may not allow it
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return descriptor_limit()


def descriptor_limit() -> int:
    """How many descriptors this process may have."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MAX_DESCRIPTORS if soft == resource.RLIM_INFINITY else min(soft, MAX_DESCRIPTORS)


def count_descriptors(pid: int | None = None) -> int:
    """How many descriptors a process of this user has, or this one; 0 where the system does not tell, or it is gone."""
    folder = f"/proc/{pid or 'self'}/fd"
    try:
        # Since Linux 6.2 the folder's size is their number; before that it is 0.
        return os.stat(folder).st_size or len(os.listdir(folder))
    except OSError:
        return 0
