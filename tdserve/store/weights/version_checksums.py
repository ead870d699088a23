"""Checksums of the leaves of a version, by which both ends find out which leaves have not changed. No torch.

A checksum has 64 bits: the CRC-32 of the bytes, and a sum of their words folded to 32 bits. One of these alone would
take a changed leaf for an unchanged one once in four thousand million times, which is not rare enough for a thousand
leaves that are published every second.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

CHUNK_NBYTES = 1024 * 1024
"""Chunk that stays in the cache for the second pass; both passes let other threads run."""

DTYPE = "<u8"
"""Dtype of checksums in messages."""

_WORD_NBYTES = 8
_LOW = 0xFFFFFFFF


def compute_leaf_checksum(content: NDArray[np.uint8], between: Callable[[], None] | None = None) -> int:
    """Returns the checksum of one leaf.

    Args:
        content: Its bytes, contiguous.
        between: Called before every chunk; may raise to stop.
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
    """Returns the sum modulo 2^64 of words of 8 bytes, little-endian; the last is padded with zeros."""
    num_whole = len(chunk) // _WORD_NBYTES * _WORD_NBYTES
    rest = int.from_bytes(chunk[num_whole:].tobytes(), "little")
    return int(np.add.reduce(np.frombuffer(chunk[:num_whole].data, "<u8"), dtype=np.uint64)) + rest
