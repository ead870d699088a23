"""The machine that this process runs on: what identifies it to other processes, and its memory and descriptors."""

from __future__ import annotations

import ctypes
import os
import resource
import shutil
import signal
import sys
from contextlib import suppress
from pathlib import Path
from typing import ClassVar, NamedTuple

KEPT_BYTES = 64 * 1024 * 1024
"""Freed memory that a process of the server keeps at the end of its heap, in bytes."""

NUM_ARENAS = 2
"""Heaps of a process that keeps freed memory and has many threads: what it keeps, it keeps in each."""

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8
"""Parameters of mallopt(3)."""

_PR_SET_PDEATHSIG = 1
"""Option of prctl(2): the signal that this process gets when the thread that started it ends."""

_PR_SET_THP_DISABLE = 41
"""Option of prctl(2): whether this process gets its memory by small pages alone."""

EXIT_NO_DESCRIPTORS = 75
"""Exit code of a data worker that ran out of descriptors; EX_TEMPFAIL of sysexits.h."""

MAX_DESCRIPTORS = 1 << 20
"""Most descriptors that a process may have. Some systems allow a thousand times as many, and programs that go through
all of them hang."""

OOM_COUNTERS = ("/proc/vmstat", "/sys/fs/cgroup/memory.events")
"""Where the kernel counts the processes that it has killed because memory ran out."""

_ORDERED_MACHINES = ("x86_64", "amd64")


def read_boot_id() -> str:
    """Returns an id that is equal in all processes of one running kernel, across containers; ``""`` if there is
    none."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return file.read().strip()
    except OSError:
        return ""


def explain_not_shared(machine: str) -> str:
    """Returns why two processes of such a machine may not read rows that the other writes; "" if they may.

    A reader copies a row between two reads of its generation. This detects every concurrent write only if the processor
    keeps loads in order, and stores too, as x86-64 does. Others need a fence, which Python does not have.

    Args:
        machine: Kind of the processor, as from ``platform.machine()``.
    """
    if machine.lower() in _ORDERED_MACHINES:
        return ""
    return f"this machine is {machine or 'of an unknown kind'}; rows are shared in memory on x86-64 only"


def read_pid_namespace() -> str:
    """Returns an id that is equal in two processes that see each other's process ids; ``""`` if it is unknown."""
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


def keep_freed_memory() -> None:
    """Lets this process keep up to 64 MiB of freed memory, instead of returning the pages of every message to the
    kernel.

    The first touch of a page costs more than copying into it: with this, reads of blocks of values of half a megabyte
    take half the time (measured). Does nothing if the C library has no such setting.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_TRIM_THRESHOLD, KEPT_BYTES)
        mallopt(_M_MMAP_THRESHOLD, KEPT_BYTES // 2)


class _HeapFigures(ctypes.Structure):
    """The struct mallinfo2 of glibc: ten figures, in bytes."""

    _fields_: ClassVar = [("figures", ctypes.c_size_t * 10)]


_FREE = 8
"""Which of them is the memory that is free."""


def return_freed_memory() -> None:
    """Returns freed memory of this process to the kernel if there are more than ``KEPT_BYTES`` of it, also between
    what is in use.

    The C library itself returns only the end of a heap, where some bytes in use keep all that lies before them: the
    control process of a soak grew by 600 MiB in an hour in which tables were created and deleted (measured). It takes
    some milliseconds, during which other threads may wait for memory. Does nothing if the C library has no such call.
    """
    library = ctypes.CDLL(None)
    measure, trim = getattr(library, "mallinfo2", None), getattr(library, "malloc_trim", None)
    if measure is None or trim is None:
        return
    measure.restype = _HeapFigures
    if measure().figures[_FREE] > KEPT_BYTES:
        trim(ctypes.c_size_t(0))


def share_arenas() -> None:
    """Lets the threads of this process share ``NUM_ARENAS`` heaps.

    By default there may be eight for each processor, and with ``keep_freed_memory`` each may keep 64 MiB that the
    others cannot use.

    Call it before there are threads. A control process grew by 10 MiB with every few tables that were created and
    deleted; it stays as it is with this (measured). Does nothing if the C library has no such setting.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_ARENA_MAX, NUM_ARENAS)


def use_small_pages(is_small: bool = True) -> None:
    """Makes this process, and those that it starts, use memory pages of 4 KiB, never of 2 MiB.

    NumPy asks for large pages for every array of 4 MiB or more. In a virtual machine the kernel takes up to 10 ms to
    provide one: an event loop would spend them on the first row of each 2 MiB of a table. Later work on the rows is
    equally fast with either (measured). Does nothing if the kernel has no such setting.

    Args:
        is_small: False undoes it.
    """
    ctypes.CDLL(None).prctl(_PR_SET_THP_DISABLE, int(is_small), 0, 0, 0)


def die_with_parent() -> None:
    """Makes the kernel kill this process when the thread that started it ends, for whatever reason.

    This works also if the process is stopped, or hangs where it cannot see that a socket was closed. A process that it
    forks has to call this itself.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def count_oom_kills() -> int:
    """Returns how many processes the kernel has killed because memory ran out, here or in this container; 0 if it
    is unknown.

    Compare two counts to learn whether one was killed between them.
    """
    return sum(map(_read_oom_kills, OOM_COUNTERS))


def _read_oom_kills(path: str) -> int:
    try:
        with open(path, encoding="ascii") as file:
            return sum(int(line.split()[1]) for line in file if line.startswith("oom_kill "))
    except OSError:
        return 0


def read_available_bytes() -> int:
    """Returns the memory that this process may still take: of the machine, and of its control group if that has a
    limit."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    available = next(1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable"))
    with suppress(OSError, ValueError):  # no limit: "max", or no such file
        limit = int(Path("/sys/fs/cgroup/memory.max").read_text())
        available = min(available, max(limit - int(Path("/sys/fs/cgroup/memory.current").read_text()), 0))
    return available


def get_own_command() -> str:
    """Returns how a shell here runs tdserve: a virtual environment may not be on PATH."""
    return "tdserve" if shutil.which("tdserve") else f"{sys.executable} -m tdserve"


def raise_descriptor_limit() -> int:
    """Raises the limit of descriptors of this process, and of those that it starts, as far as allowed; returns the
    limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, MAX_DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with suppress(OSError, ValueError):  # a sandbox may not allow it
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return get_descriptor_limit()


def get_descriptor_limit() -> int:
    """Returns how many descriptors this process may have."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MAX_DESCRIPTORS if soft == resource.RLIM_INFINITY else min(soft, MAX_DESCRIPTORS)


def count_descriptors(pid: int | None = None) -> int:
    """Returns how many descriptors a process of this user, or this one, has open; 0 if that is unknown or it is
    gone."""
    folder = f"/proc/{pid or 'self'}/fd"
    try:
        # Since Linux 6.2 the folder's size is their number; before that it is 0.
        return os.stat(folder).st_size or len(os.listdir(folder))
    except OSError:
        return 0


class ProcessUse(NamedTuple):
    """What a process takes of its machine.

    Attributes:
        resident_bytes: Memory, with mapped files that are in memory.
        anonymous_bytes: Memory without files.
        cpu_s: Processor time since its start, user and system.
        num_descriptors: Open descriptors.
    """

    resident_bytes: int = 0
    anonymous_bytes: int = 0
    cpu_s: float = 0.0
    num_descriptors: int = 0


def read_process_use(pid: int | None = None) -> ProcessUse:
    """Returns what a process of this user, or this one, takes; zeros if it is gone."""
    try:
        with open(f"/proc/{pid or 'self'}/statm", encoding="ascii") as file:
            _, resident, shared, *_ = map(int, file.read().split())
        with open(f"/proc/{pid or 'self'}/stat", encoding="utf-8", errors="replace") as file:
            fields = file.read().rpartition(")")[2].split()  # the name in front may contain anything
    except (OSError, ValueError):
        return ProcessUse()
    page, ticks = resource.getpagesize(), os.sysconf("SC_CLK_TCK")
    cpu_s = (int(fields[11]) + int(fields[12])) / ticks
    return ProcessUse(resident * page, (resident - shared) * page, cpu_s, count_descriptors(pid))
