"""Marks of use: a byte for each of many groups of keys, in a file that all readers of a store have mapped.

A reader sets the mark of a key; eviction, which looks for entries that are not used, takes it away. Keys whose hashes
agree share a mark, and marks get lost if both happen at once: good enough for an approximation.
"""

from __future__ import annotations

import os
import zlib
from pathlib import Path

import numpy as np

from tdserve.store.disk.faults import convert_os_errors
from tdserve.store.disk.mapped import map_shared

FILE_NAME = "used.memmap"

NUM_MARKS = 1 << 20
"""A mebibyte: of a million keys, two thirds have a mark of their own."""


class UseMarks:
    """The mapped marks of a store.

    Args:
        folder: Folder of the store.
        creates: Whether the file is created if it is missing.

    Raises:
        CapacityError, InvalidRequestError, CorruptDataError: The file cannot be used.
    """

    def __init__(self, folder: Path, *, creates: bool = False) -> None:
        path = folder / FILE_NAME
        with convert_os_errors(path, asked=NUM_MARKS):
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | (os.O_CREAT if creates else 0), 0o666)
            try:
                if os.fstat(fd).st_size < NUM_MARKS:
                    os.posix_fallocate(fd, 0, NUM_MARKS)
                mapping = map_shared(fd, NUM_MARKS, writable=True, path=path)
            finally:
                os.close(fd)
        self._marks = np.frombuffer(mapping, np.uint8).data

    @staticmethod
    def exist(folder: Path) -> bool:
        """Returns whether a store has marks that this process may set."""
        return os.access(folder / FILE_NAME, os.W_OK)

    def set(self, key: bytes) -> None:
        """Sets the mark of a key."""
        self._marks[zlib.crc32(key) % NUM_MARKS] = 1

    def take(self, key: bytes) -> bool:
        """Returns whether the mark of a key is set, and takes it away."""
        place = zlib.crc32(key) % NUM_MARKS
        is_set = bool(self._marks[place])
        self._marks[place] = 0
        return is_set
