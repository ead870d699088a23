"""Lists of files whose blocks may have changed (``FileSizes``): a bit for each block, that of the first one lowest."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tdserve.v1 import control_pb2

MAX_BLOCK_BYTES = 1 << 20
"""Bytes of a block, except the last of a file: both servers' event loops handle the message that brings it at once."""


class ChangedFile(NamedTuple):
    """A file of a list.

    Attributes:
        path: Below the store's folder.
        numbers: Numbers of the blocks that may have changed.
    """

    path: bytes
    nbytes: int
    numbers: NDArray[np.int64]

    def compute_size(self, number: int) -> int:
        """Returns the bytes of a block."""
        return min(MAX_BLOCK_BYTES, self.nbytes - number * MAX_BLOCK_BYTES)


def count_blocks(nbytes: int) -> int:
    """Returns the number of blocks of a file."""
    return -(-nbytes // MAX_BLOCK_BYTES)


def pack_changed(changed: NDArray[np.bool_]) -> bytes:
    """Returns the bits of a file's blocks."""
    return np.packbits(changed, bitorder="little").tobytes()


def iter_changed(files: control_pb2.FileSizes) -> Iterator[ChangedFile]:
    """Yields all files of a list."""
    for path, nbytes, changed in zip(files.paths, files.nbytes, files.changed, strict=True):
        num_blocks = count_blocks(nbytes)
        bits = np.unpackbits(np.frombuffer(changed, np.uint8), count=num_blocks, bitorder="little")
        yield ChangedFile(path, nbytes, np.flatnonzero(bits) if changed else np.arange(num_blocks))


def count_changed_bytes(files: control_pb2.FileSizes) -> int:
    """Returns the size of what may have changed, at most."""
    return sum(min(len(file.numbers) * MAX_BLOCK_BYTES, file.nbytes) for file in iter_changed(files))


def clear_changed(files: control_pb2.FileSizes) -> control_pb2.FileSizes:
    """Returns a list of the same files of which nothing has changed."""
    none = [pack_changed(np.zeros(count_blocks(nbytes), np.bool_)) for nbytes in files.nbytes]
    return control_pb2.FileSizes(paths=files.paths, nbytes=files.nbytes, changed=none)
