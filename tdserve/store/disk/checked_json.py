"""Small JSON files that end with a checksum of themselves: any changed byte is found when one is read."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from crc32c import crc32c

from tdserve.base.errors import CorruptDataError
from tdserve.store.disk.sealed import REMEDY

_KEY = "checksum"


def encode_checked(fields: Mapping[str, Any]) -> bytes:
    """Returns an object as JSON, with the CRC-32C of all else as its last field."""
    return json.dumps({**fields, _KEY: f"{crc32c(json.dumps(fields).encode()):08x}"}).encode()


def decode_checked(content: bytes, path: str) -> dict[str, Any]:
    """Returns the object that ``encode_checked`` has encoded; spaces behind it do not count.

    Args:
        path: Path of the file, for the message.

    Raises:
        CorruptDataError: The content is damaged.
    """
    try:
        found = json.loads(content)
        checksum = found.pop(_KEY)
        is_whole = encode_checked(found) == content.rstrip(b" ")
    except (ValueError, TypeError, KeyError, AttributeError):
        is_whole, checksum = False, "none"
    if not is_whole:
        actual = f"{bytes(content[:80])!r}; {REMEDY}"
        raise CorruptDataError(path=path, expected=f"a JSON object of checksum {checksum}", actual=actual)
    fields: dict[str, Any] = found
    return fields
