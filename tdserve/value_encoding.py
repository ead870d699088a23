"""The bytes of ``Value`` messages, written by hand: a tenth of the calls that the message classes need.

They are the bytes that protobuf writes. What is not common is left to ``tdserve.value_messages``.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
from google.protobuf.message import EncodeError

from tdserve.errors import NotSupportedError
from tdserve.value_messages import MAX_DEPTH, encode_value

_MAX_MESSAGE_BYTES = 2**31 - 1
"""What protobuf takes."""

_MAX_KEY_BYTES = 64
_MAX_KEYS = 4096
"""Keys of dicts repeat from value to value: up to so many are kept with their bytes."""

_DOUBLE = struct.Struct("<d")


class _Uncommon(Exception):  # noqa: N818 - a way out, not an error
    """Not for this module."""


def encode(value: Any, *, key: str = "") -> bytes:
    """The serialised message of a value.

    Raises:
        NotSupportedError: As ``encode_value``; or the value has 2 GiB or more. Nothing was changed.
    """
    try:
        data = _WRITERS[type(value)](value, MAX_DEPTH)
    except (KeyError, _Uncommon):
        data = _encode_message(value, key)
    return _checked(data, key)


def encode_common(values: Sequence[Any]) -> list[bytes] | None:
    """``encode`` of each, when all of them are common and short; else None."""
    writers = _WRITERS
    try:
        blobs = [writers[type(value)](value, MAX_DEPTH) for value in values]
    except (KeyError, _Uncommon):
        return None
    return blobs if max(map(len, blobs), default=0) <= _MAX_MESSAGE_BYTES else None


def pickled(content: bytes, *, key: str = "") -> bytes:
    """The serialised message of a value that was pickled.

    Raises:
        NotSupportedError: It has 2 GiB or more.
    """
    return _checked(_field(b"\x72", content), key)


def _checked(data: bytes, key: str) -> bytes:
    if len(data) > _MAX_MESSAGE_BYTES:
        raise NotSupportedError(feature=f"the value at key {key!r}", reason=f"{len(data)} bytes are 2 GiB or more")
    return data


def _encode_message(value: Any, key: str) -> bytes:
    try:
        return encode_value(value, key=key).SerializeToString()
    except (EncodeError, ValueError) as error:
        raise NotSupportedError(
            feature=f"the value at key {key!r}", reason=f"protobuf cannot carry it: {error}"
        ) from None


def varint(number: int) -> bytes:
    """A natural number as protobuf writes it."""
    out = bytearray()
    while number > 127:
        out.append(number & 127 | 128)
        number >>= 7
    out.append(number)
    return bytes(out)


_SHORT = tuple(varint(number) for number in range(2048))
_NUM_SHORT = len(_SHORT)
"""Lengths of nearly all values, ready made."""


def _field(tag: bytes, content: bytes) -> bytes:
    size = len(content)
    return tag + (_SHORT[size] if size < _NUM_SHORT else varint(size)) + content


def _write_none(_value: None, _depth: int) -> bytes:
    return b"\x08\x01"


def _write_bool(value: bool, _depth: int) -> bytes:
    return b"\x10\x01" if value else b"\x10\x00"


def _write_int(value: int, _depth: int) -> bytes:
    if not -(2**63) <= value < 2**63:
        raise _Uncommon
    zigzag = (value << 1) ^ (value >> 63)
    return b"\x18" + (_SHORT[zigzag] if zigzag < _NUM_SHORT else varint(zigzag))


def _write_float(value: float, _depth: int) -> bytes:
    return b"\x29" + _DOUBLE.pack(value)


def _write_text(value: str, _depth: int) -> bytes:
    try:
        return _field(b"\x32", value.encode())
    except UnicodeEncodeError:
        return _field(b"\x6a", value.encode("utf-8", "surrogatepass"))


def _write_raw(value: bytes, _depth: int) -> bytes:
    return _field(b"\x3a", value)


def _write_list(value: list[Any], depth: int) -> bytes:
    return _field(b"\x42", _items(value, depth))


def _write_tuple(value: tuple[Any, ...], depth: int) -> bytes:
    return _field(b"\x4a", _items(value, depth))


def _items(values: Iterable[Any], depth: int) -> bytes:
    if depth <= 0:
        raise _Uncommon
    depth -= 2
    writers = _WRITERS
    return b"".join([_field(b"\x0a", writers[type(value)](value, depth)) for value in values])


_FIRST_HEADS = tuple(b"\x0a" + size for size in _SHORT)
"""What stands before the item of a container, by its length."""

_TEXT_HEADS = tuple(bytes((0x12, size + 2, 0x32, size)) for size in range(126))
"""What stands before a short text that is the value of a pair, by its length."""


def _write_dict(value: dict[Any, Any], depth: int) -> bytes:
    if depth <= 0:
        raise _Uncommon
    depth -= 3
    writers = _WRITERS
    parts = []
    for name, item in value.items():
        if type(name) is str:
            pair = _NAMES_WRITTEN.get(name) or _write_name(name)
        else:
            pair = _field(b"\x0a", writers[type(name)](name, depth))
        kind = type(item)
        if kind is str and len(item) < 126 and item.isascii():
            pair += _TEXT_HEADS[len(item)] + item.encode()
        elif kind is float:
            pair += b"\x12\x09\x29" + _DOUBLE.pack(item)
        else:
            pair += _field(b"\x12", writers[kind](item, depth))
        size = len(pair)
        parts.append(_FIRST_HEADS[size] + pair if size < _NUM_SHORT else _field(b"\x0a", pair))
    return _field(b"\x52", b"".join(parts))


def _write_numpy(value: Any, depth: int) -> bytes:
    if depth <= 0:
        raise _Uncommon
    try:
        return encode_value(value).SerializeToString()
    except (NotSupportedError, EncodeError, ValueError):
        raise _Uncommon from None  # said again with the key


_NAMES_WRITTEN: dict[str, bytes] = {}


def _write_name(name: str) -> bytes:
    data = _field(b"\x0a", _write_text(name, 0))
    if len(data) <= _MAX_KEY_BYTES:
        if len(_NAMES_WRITTEN) >= _MAX_KEYS:
            _NAMES_WRITTEN.clear()
        _NAMES_WRITTEN[name] = data
    return data


_WRITERS: dict[type, Callable[[Any, int], bytes]] = {
    type(None): _write_none,
    bool: _write_bool,
    int: _write_int,
    float: _write_float,
    str: _write_text,
    bytes: _write_raw,
    list: _write_list,
    tuple: _write_tuple,
    dict: _write_dict,
    np.ndarray: _write_numpy,
    **dict.fromkeys(set(np.sctypeDict.values()), _write_numpy),
}
