"""Checksums of the leaves of a version: by them both ends tell which leaves have not changed. No torch.

A checksum has 64 bits: the CRC-32 of the bytes, and a sum of their words folded to 32 bits. One alone would take a
changed leaf for an unchanged one every four thousand million times, which is not rare enough for a thousand leaves
that are published every second.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

CHUNK_NBYTES = 1024 * 1024
"""Stays in the cache for the second look; both looks let other threads go on."""

DTYPE = "<u8"
"""Of checksums as they travel."""

_WORD_NBYTES = 8
_LOW = 0xFFFFFFFF


def leaf_checksum(content: NDArray[np.uint8], between: Callable[[], None] | None = None) -> int:
    """The checksum of one leaf.

    Args:
        content: Its bytes, contiguous.
        between: Called before every chunk, and may raise to end it.
    """
    crc = total = 0
    for start in range(0, len(content), CHUNK_NBYTES):
        if between is not None:
            between()
        chunk = content[start : start + CHUNK_NBYTES]
        crc = zlib.crc32(chunk.data, crc)
        total += _sum_of(chunk)
    total %= 2**64
    return crc << 32 | (total ^ total >> 32) & _LOW


def _sum_of(chunk: NDArray[np.uint8]) -> int:
    """Words of 8 bytes, little-endian, added modulo 2^64; the last is filled up with zeros."""
    num_whole = len(chunk) // _WORD_NBYTES * _WORD_NBYTES
    rest = int.from_bytes(chunk[num_whole:].tobytes(), "little")
    return int(np.add.reduce(np.frombuffer(chunk[:num_whole].data, "<u8"), dtype=np.uint64)) + rest
