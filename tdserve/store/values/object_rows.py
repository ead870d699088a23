"""Keys of the table of non-tensor values: a path's name, then the row. For modules that have a cursor on it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from functools import lru_cache

import lmdb
import numpy as np
import numpy.typing as npt

from tdserve.base.errors import LocalProtocolError
from tdserve.store.disk.sealed import unseal

KeyPath = tuple[str, ...]

Rows = Sequence[int] | npt.NDArray[np.int64]

NAME_BYTES = 16

_ROW_BYTES = 8
_TAIL = np.dtype(f"V{_ROW_BYTES}")

COMMON = bytes(_ROW_BYTES)
"""Tail of the key of the value that is common to all rows without one of their own."""

_FIRST_ROW = (1).to_bytes(8, "big")


@lru_cache(maxsize=4096)
def make_name(path: KeyPath | tuple[KeyPath, ...]) -> bytes:
    """Returns the name of a path, or of several together, in keys."""
    # LMDB keys have at most 511 bytes, keys of tensordicts have no limit: 128 bits name a path without collisions
    return hashlib.sha256(json.dumps(path).encode()).digest()[:NAME_BYTES]


def make_tails(rows: Rows) -> list[bytes]:
    """Returns the tail of each row's key."""
    numbers = np.asarray(rows, np.int64)
    if len(numbers) and int(numbers.min()) < 0:
        raise LocalProtocolError(reason=f"row {int(numbers.min())} of a value")
    tails: list[bytes] = (numbers + 1).astype(">u8").view(_TAIL).tolist()
    return tails


def has_rows(cursor: lmdb.Cursor, name: bytes) -> bool:
    """Returns whether single rows have values under a name."""
    return bool(cursor.set_range(name + _FIRST_ROW)) and cursor.key()[:NAME_BYTES] == name


def clear(cursor: lmdb.Cursor, name: bytes, *, with_common: bool = False) -> None:
    """Deletes the values of single rows, or all values, under a name."""
    more = cursor.set_range(name + (COMMON if with_common else _FIRST_ROW))
    while more and cursor.key()[:NAME_BYTES] == name:
        more = cursor.delete()  # moves on to the next record; False after the last one


def read_all(cursor: lmdb.Cursor, name: bytes, path: str) -> list[tuple[bytes, bytes]]:
    """Returns all values under a name, each with the tail of its key. Raises CorruptDataError, which names ``path``, if
    one is damaged."""
    found = []
    more = cursor.set_range(name + COMMON)
    while more and cursor.key()[:NAME_BYTES] == name:
        key = bytes(cursor.key())
        found.append((key[NAME_BYTES:], bytes(unseal(key, cursor.value(), path))))
        more = cursor.next()
    return found
