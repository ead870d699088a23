"""Finds the byte of LMDB's first two pages that has changed, by the checksum that the whole file had.

These pages tell which tree of records is the newest. With one byte changed there LMDB may take an earlier tree, all of
whose records are whole: no checksum of a record shows that something was lost.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from mmap import PAGESIZE
from pathlib import Path
from typing import NamedTuple

from crc32c import crc32c

from tdserve.store.database.page_walk import META_BYTES
from tdserve.store.disk.faults import convert_os_errors

_NUM_BITS = 32
"""Of a checksum."""

_CHUNK_BYTES = 1 << 20


class ChangedByte(NamedTuple):
    """One byte that is not what it was.

    Attributes:
        offset: Its place in the file.
        value: What it was.
    """

    offset: int
    value: int

    def put_back(self, path: Path) -> None:
        """Writes what it was. Errors as in ``convert_os_errors``."""
        with convert_os_errors(path), open(path, "r+b") as file:
            file.seek(self.offset)
            file.write(bytes([self.value]))
            file.flush()
            os.fsync(file.fileno())


def find_changed_byte(path: Path, checksum: int) -> ChangedByte | None:
    """Returns the only byte that has changed since a file had this CRC-32C, if it is one that leads to the records.

    A wrong answer is possible once in 50,000 files that have changed elsewhere, whose checksum is then right by chance.
    """
    with convert_os_errors(path), open(path, "rb") as file:
        first = bytearray(file.read(2 * PAGESIZE))
        # What the rest makes of a checksum is linear: of each of its bits, apart from what it makes of 0.
        made = [0, *(1 << bit for bit in range(_NUM_BITS))]
        while chunk := file.read(_CHUNK_BYTES):
            made = [crc32c(chunk, each) for each in made]
    wanted = _solve([each ^ made[0] for each in made[1:]], checksum ^ made[0])
    for offset in (page + at for page in (0, PAGESIZE) for at in range(META_BYTES)):
        if offset >= len(first):
            return None
        found = first[offset]
        for value in range(256):
            first[offset] = value
            if value != found and crc32c(first) == wanted:
                return ChangedByte(offset, value)
        first[offset] = found
    return None


def _solve(made_of_bits: Sequence[int], wanted: int) -> int:
    """Returns the bits of which so much is made; any number is made of just one choice of them."""
    reduced = dict[int, tuple[int, int]]()  # by the highest bit: what is made, and of which bits
    for bit, made in enumerate(made_of_bits):
        bits = 1 << bit
        while made and (known := reduced.get(made.bit_length())):
            made, bits = made ^ known[0], bits ^ known[1]
        reduced[made.bit_length()] = made, bits
    found = 0
    while wanted:
        made, bits = reduced[wanted.bit_length()]
        wanted, found = wanted ^ made, found ^ bits
    return found
