"""Sealed records: each ends with a checksum of its key and its value, which is compared whenever it is read.

The pages of LMDB have no checksums. A record of the catalog, or a non-tensor value, that was damaged on the disk or in
memory is so reported instead of returned. The checksum is the CRC-32C of the key and the value: 4 bytes, little-endian.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import repeat
from operator import getitem
from typing import Any

from crc32c import crc32c

from tdserve.base.errors import CorruptDataError
from tdserve.values.value_columns import Buffer

SEAL_BYTES = 4

_WHOLE = 0x48674BC7
"""CRC-32C of anything that ends with its own CRC-32C: so one call compares, without taking the record apart."""


_VALUE = slice(None, -SEAL_BYTES)


def seal(key: Buffer, value: Buffer) -> bytes:
    """Returns a record as it is kept: the value and its checksum."""
    return b"".join((value, crc32c(value, crc32c(key)).to_bytes(SEAL_BYTES, "little")))


def unseal(key: Buffer, record: Buffer, path: str) -> Buffer:
    """Returns the value of a record, a view if the record is one.

    Args:
        path: Where it lies, for the message.

    Raises:
        CorruptDataError: It is damaged, or belongs to another key.
    """
    if crc32c(record, crc32c(key)) != _WHOLE:
        raise make_damage(key, record, path)
    return record[:-SEAL_BYTES]


def unseal_all(keys: Sequence[Buffer], records: Sequence[Any], path: str) -> list[Any]:
    """Returns the values of many records, None for those that are None; otherwise as ``unseal``, which takes three
    times as long."""
    if None in records:
        return [None if each is None else unseal(key, each, path) for key, each in zip(keys, records, strict=True)]
    checksums = list(map(crc32c, records, map(crc32c, keys)))
    if checksums.count(_WHOLE) < len(checksums):
        number = next(number for number, each in enumerate(checksums) if each != _WHOLE)
        raise make_damage(keys[number], records[number], path)
    return list(map(getitem, records, repeat(_VALUE)))


def is_whole(key: Buffer, record: Buffer) -> bool:
    """Returns whether a record belongs to its key and is undamaged."""
    return crc32c(record, crc32c(key)) == _WHOLE


def make_damage(key: Buffer, record: Buffer, path: str) -> CorruptDataError:
    """Returns the error for a damaged record."""
    expected = f"checksum {bytes(record[-SEAL_BYTES:])[::-1].hex()} of record {bytes(key)[:80].hex()}"
    actual = f"{crc32c(record[:-SEAL_BYTES], crc32c(key)):08x}; {REMEDY}"
    return CorruptDataError(path=path, expected=expected, actual=actual)


REMEDY = "stop the server, and run tdserve check --repair on its root"
"""What to do about any damaged file of a root."""
