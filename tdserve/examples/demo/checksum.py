"""A number for the content of a replay as clients read it. It tells whether the content has changed."""

from __future__ import annotations

import zlib
from typing import NamedTuple

import tdserve


class Checksum(NamedTuple):
    """A checksum of the live rows of a replay."""

    crc32: int
    num_rows: int

    def __str__(self) -> str:
        return f"crc32 {self.crc32:08x} over {self.num_rows} rows"


def checksum(replay: tdserve.ReplayHandle) -> Checksum:
    """Returns the checksum of all rows, leaf by leaf in the order of their names.

    Raises:
        TDServeError: The rows could not be read.
    """
    if not len(replay):
        return Checksum(0, 0)
    rows = replay[:]
    found = 0
    for key in sorted(rows.keys(True, True), key=str):
        found = zlib.crc32(rows[key].contiguous().numpy().tobytes(), found)
    return Checksum(found, rows.batch_size[0])
