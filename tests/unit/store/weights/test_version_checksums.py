from __future__ import annotations

import zlib

import numpy as np
import pytest

from tdserve.store.weights.version_checksums import CHUNK_NBYTES, compute_leaf_checksum

RANDOM = np.random.default_rng(0)


@pytest.mark.parametrize("nbytes", [0, 1, 7, 8, 13, CHUNK_NBYTES - 1, CHUNK_NBYTES, 2 * CHUNK_NBYTES + 5])
def test_checksum_when_of_any_length_then_as_in_the_protocol_book(nbytes: int) -> None:
    content = RANDOM.integers(0, 256, nbytes, dtype=np.uint8)
    padded = content.tobytes().ljust(-(-nbytes // 8) * 8, b"\0")
    total = sum(int.from_bytes(padded[at : at + 8], "little") for at in range(0, len(padded), 8)) % 2**64
    assert compute_leaf_checksum(content) == zlib.crc32(content.data) << 32 | (total & 0xFFFFFFFF) ^ (total >> 32)


def test_checksum_when_one_byte_changes_then_another_wherever_the_memory_begins() -> None:
    memory = RANDOM.integers(0, 256, 4100, dtype=np.uint8)
    before = compute_leaf_checksum(memory[3:])
    assert compute_leaf_checksum(memory[3:].copy()) == before
    memory[-1] ^= 1
    assert compute_leaf_checksum(memory[3:]) != before


def test_checksum_when_it_is_to_end_then_it_does_before_the_next_chunk() -> None:
    chunks = iter(range(2))

    def between() -> None:
        if next(chunks) == 1:
            raise InterruptedError

    with pytest.raises(InterruptedError):
        compute_leaf_checksum(np.zeros(3 * CHUNK_NBYTES, np.uint8), between)
    assert list(chunks) == []
