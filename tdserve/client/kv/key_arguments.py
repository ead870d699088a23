"""The arguments of calls on keyed stores, as callers give them: of a store on one server, or on several."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tdserve.base.errors import InvalidRequestError
from tdserve.base.integers import check_integer
from tdserve.rules.kv.entry_changes import MAX_KEY_BYTES, check_num_keys

Keys = str | list[str]
"""One key, or several that can be gone through twice."""


def encode_key(key: object) -> bytes:
    """Returns a key as the server has it. Raises InvalidRequestError if no entry can have it."""
    if not isinstance(key, str):
        raise InvalidRequestError(argument="key", reason=f"{key!r} is not a str")
    try:
        encoded = key.encode()
    except UnicodeEncodeError as fault:
        raise InvalidRequestError(argument="key", reason=f"{key[:40]!r} is not valid unicode") from fault
    if not 1 <= len(encoded) <= MAX_KEY_BYTES:
        reason = f"{key[:40]!r} has {len(encoded)} bytes in UTF-8, not 1 to {MAX_KEY_BYTES}"
        raise InvalidRequestError(argument="key", reason=reason)
    return encoded


def settle_keys(keys: Any) -> Keys:
    """Returns one key, or several in a list."""
    return keys if isinstance(keys, str) else list_keys(keys)


def encode_keys(keys: str | Sequence[str]) -> list[bytes]:
    """Returns one key, or several, as ``encode_key`` does."""
    if isinstance(keys, str):
        return [encode_key(keys)]
    try:
        encoded = [*map(str.encode, keys)]  # in half the time
    except (TypeError, UnicodeEncodeError):
        return [*map(encode_key, keys)]
    sizes = [*map(len, encoded)]
    return encoded if sizes and 1 <= min(sizes) <= max(sizes) <= MAX_KEY_BYTES else [*map(encode_key, keys)]


def list_keys(keys: Any) -> list[str]:
    """Returns several keys, from any iterable.

    Raises:
        InvalidRequestError, TooLargeError: A key is invalid, or there are too many for one call.
    """
    if isinstance(keys, (bytes, bytearray)):
        raise InvalidRequestError(argument="keys", reason=f"{bytes(keys)!r} is neither a str nor a list of str")
    try:
        found = list(keys)
    except TypeError as fault:
        raise InvalidRequestError(argument="keys", reason=f"{keys!r} is neither a str nor a list of str") from fault
    check_num_keys(found)
    return found


def list_versions(versions: int | Sequence[int], num_keys: int) -> list[int]:
    """Returns the version that each entry must have, of one for each or one for all.

    Raises:
        InvalidRequestError: One is no version, or their number differs from that of the keys.
    """
    given = [versions] * num_keys if not isinstance(versions, (list, tuple)) else list(versions)
    if len(given) != num_keys:
        raise InvalidRequestError(argument="if_version", reason=f"{len(given)} versions for {num_keys} keys")
    return [check_integer("if_version", version, 0) for version in given]
