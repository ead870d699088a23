"""The bytes of ``Value`` messages, read by hand: a tenth of the calls that the message classes need.

Only messages in exactly the form that ``encoding`` writes are read here. Everything else, damaged and hostile ones too,
is left to ``messages``, which has the last word.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from google.protobuf.message import DecodeError

from tdserve.base.errors import RemoteProtocolError
from tdserve.messages.value_columns import JoinedValues
from tdserve.v1 import content_pb2
from tdserve.values.messages import MAX_DEPTH, decode_array, decode_scalar, decode_value

# First byte of a Value: number of its field << 3 | wire type.
_NONE, _BOOLEAN, _SMALL_INT, _BIG_INT, _REAL, _TEXT, _RAW = 0x08, 0x10, 0x18, 0x22, 0x29, 0x32, 0x3A
_LIST, _TUPLE, _DICT, _NDARRAY, _SCALAR, _SURROGATE_TEXT = 0x42, 0x4A, 0x52, 0x5A, 0x62, 0x6A
PICKLED = 0x72
"""First byte of a value that only ``tdserve.values.pickled`` looks into."""

_FIRST, _SECOND = 0x0A, 0x12
"""Tags of fields 1 and 2 of the messages that containers consist of."""

_MAX_INT_BYTES = 10

_MAX_KEY_BYTES = 64
_MAX_KEYS = 4096
"""Keys of dicts repeat from value to value: up to so many are kept with their bytes."""

_DOUBLE = struct.Struct("<d")


class _Uncommon(Exception):  # noqa: N818 - a way out, not an error
    """Not for this module."""


_NOT_READ = (_Uncommon, IndexError, TypeError, ValueError, struct.error, DecodeError)
"""What hostile bytes lead to: TypeError is a key that cannot be hashed, ValueError text that is no UTF-8. A length that
leads out of a value is found out by the value around it: that does not end where it should."""


def decode(data: bytes) -> Any:
    """The value of a serialised message.

    Raises:
        RemoteProtocolError: The bytes are no such message. Never raises anything else.
    """
    try:
        return _read(data, 0, len(data), MAX_DEPTH)
    except _NOT_READ:
        pass
    try:
        message = content_pb2.Value.FromString(data)
    except DecodeError as error:
        raise RemoteProtocolError(expected="a serialised value", received=str(error)[:200]) from None
    return decode_value(message)


def decode_common(blobs: Sequence[bytes]) -> list[Any] | None:
    """``decode`` of each, when all of them are in the common form and none is pickled; else None."""
    try:
        if isinstance(blobs, JoinedValues) and isinstance(blobs.content, bytes) and not blobs.heads:
            content = blobs.content  # uncopied: half the time of texts of 8 KB, nine tenths of numbers' (measured)
            return [_read(content, begin, end, MAX_DEPTH) for begin, end in blobs.bounds()]
        return [_read(data, 0, len(data), MAX_DEPTH) for data in blobs]
    except (*_NOT_READ, RemoteProtocolError):
        return None


def pickled_content(data: bytes) -> bytes:
    """What ``pickled`` was given.

    Raises:
        RemoteProtocolError: The bytes are no such message.
    """
    try:
        content: bytes = content_pb2.Value.FromString(data).pickled
    except DecodeError as error:
        raise RemoteProtocolError(expected="a serialised value", received=str(error)[:200]) from None
    return content


_NAMES_READ: dict[bytes, str] = {}


def _read(data: bytes, start: int, end: int, depth: int) -> Any:
    """The value whose message is ``data[start:end]``; every form that is read ends exactly there, whatever follows."""
    tag = data[start]
    if tag > _REAL or tag == _BIG_INT:
        size = data[start + 1]
        start += 2
        if size > 127:
            size, start = _read_varint(data, start - 1)
        if start + size != end:
            raise _Uncommon
        if tag == _TEXT:
            return data[start:end].decode()
        reader = _READERS.get(tag)
        if reader is None:
            raise _Uncommon
        return reader(data, start, end, depth)
    if tag == _REAL:
        if start + 9 != end:
            raise _Uncommon
        return _DOUBLE.unpack_from(data, start + 1)[0]
    if tag == _SMALL_INT:
        number, start = _read_varint(data, start + 1)
        if start != end or number >> 64:
            raise _Uncommon
        return (number >> 1) ^ -(number & 1)
    return _read_atom(data, start, end)


def _read_atom(data: bytes, start: int, end: int) -> Any:
    content = data[start:end]
    if content == b"\x10\x01":
        return True
    if content == b"\x10\x00":
        return False
    if content == b"\x08\x01":
        return None
    raise _Uncommon


def _read_varint(data: bytes, start: int) -> tuple[int, int]:
    """A number of up to 70 bits, and where it ends."""
    number = data[start]
    if number < 128:
        return number, start + 1
    number &= 127
    for place in range(1, _MAX_INT_BYTES):
        byte = data[start + place]
        number |= (byte & 127) << 7 * place
        if byte < 128:
            return number, start + place + 1
    raise _Uncommon


def _read_raw(data: bytes, start: int, end: int, _depth: int) -> bytes:
    return data[start:end]


def _read_big_int(data: bytes, start: int, end: int, _depth: int) -> int:
    return int.from_bytes(data[start:end], "little", signed=True)


def _read_surrogates(data: bytes, start: int, end: int, _depth: int) -> str:
    return data[start:end].decode("utf-8", "surrogatepass")


def _read_ndarray(data: bytes, start: int, end: int, _depth: int) -> np.ndarray[Any, Any]:
    return decode_array(content_pb2.NDArray.FromString(data[start:end]))


def _read_scalar(data: bytes, start: int, end: int, _depth: int) -> Any:
    return decode_scalar(content_pb2.NDArray.FromString(data[start:end]))


def _read_list(data: bytes, start: int, end: int, depth: int) -> list[Any]:
    if depth <= 0:
        raise _Uncommon
    items = []
    while start < end:
        if data[start] != _FIRST:
            raise _Uncommon
        size = data[start + 1]
        start += 2
        if size > 127:
            size, start = _read_varint(data, start - 1)
        items.append(_read(data, start, start + size, depth - 2))
        start += size
    if start != end:
        raise _Uncommon
    return items


def _read_tuple(data: bytes, start: int, end: int, depth: int) -> tuple[Any, ...]:
    return tuple(_read_list(data, start, end, depth))


def _read_dict(data: bytes, start: int, end: int, depth: int) -> dict[Any, Any]:
    if depth <= 0:
        raise _Uncommon
    found: dict[Any, Any] = {}
    num_pairs = 0
    while start < end:
        if data[start] != _FIRST:
            raise _Uncommon
        size = data[start + 1]
        start += 2
        if size > 127:
            size, start = _read_varint(data, start - 1)
        end_of_pair = start + size
        if data[start] != _FIRST:
            raise _Uncommon
        size = data[start + 1]
        start += 2
        if size > 127:
            size, start = _read_varint(data, start - 1)
        name: Any = _NAMES_READ.get(data[start : start + size])
        if name is None:
            name = _read_name(data, start, start + size, depth - 3)
        start += size
        if data[start] != _SECOND:
            raise _Uncommon
        size = data[start + 1]
        start += 2
        if size > 127:
            size, start = _read_varint(data, start - 1)
        if start + size != end_of_pair:
            raise _Uncommon
        found[name] = _read(data, start, end_of_pair, depth - 3)
        start = end_of_pair
        num_pairs += 1
    if start != end or num_pairs != len(found):
        raise _Uncommon
    return found


def _read_name(data: bytes, start: int, end: int, depth: int) -> Any:
    name = _read(data, start, end, depth)
    if type(name) is str and end - start <= _MAX_KEY_BYTES:
        if len(_NAMES_READ) >= _MAX_KEYS:
            _NAMES_READ.clear()
        _NAMES_READ[data[start:end]] = name
    return name


_READERS: dict[int, Callable[[bytes, int, int, int], Any]] = {
    _RAW: _read_raw,
    _LIST: _read_list,
    _TUPLE: _read_tuple,
    _DICT: _read_dict,
    _BIG_INT: _read_big_int,
    _SURROGATE_TEXT: _read_surrogates,
    _NDARRAY: _read_ndarray,
    _SCALAR: _read_scalar,
}
