"""The machine that this process runs on: what two processes can compare of it, and its memory."""

from __future__ import annotations

import ctypes
import os

KEPT_BYTES = 64 * 1024 * 1024
"""Freed memory that a process of the server keeps at the end of its heap."""

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
"""Of mallopt(3)."""


def boot_id() -> str:
    """Equal in two processes of one running kernel, also in different containers; ``""`` where there is none."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return file.read().strip()
    except OSError:
        return ""


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
