"""Encodes as MessagePack extension types what MessagePack has no type for, and restores it. No torch."""

from __future__ import annotations

import math
import re
from typing import Any

import msgpack
import numpy as np

from tdserve.base.errors import RemoteProtocolError
from tdserve.values.supported import CONTAINER_TYPES, TYPE_NAMES, UNPORTABLE, check_other

BIG_INT, TUPLE, ARRAY, SCALAR, CONTAINER_TYPE = range(1, 6)

_DTYPE = re.compile(r"[<>|][biufcSUMm]\d{1,10}(\[\d{0,10}[a-zA-Z]{1,2}\])?")

_SIZE_BYTES = 8


class _TupleMark:
    """First item of a list that represents a tuple. It is no value: a record with one elsewhere is refused."""


_MARK = _TupleMark()
_PACKED_MARK = msgpack.ExtType(TUPLE, b"")


def encode_other(value: Any, *, key: str = "") -> Any:
    """Returns the MessagePack equivalent of a value whose type the packer does not know.

    Raises:
        NotSupportedError: It does not travel; the error names ``key`` and the type.
    """
    kind = type(value)
    if kind is tuple:
        return [_PACKED_MARK, *value]
    if kind is int:  # of more than 64 bits
        bits = (value if value >= 0 else ~value).bit_length() + 1  # one for the sign
        return msgpack.ExtType(BIG_INT, value.to_bytes(-(-bits // 8), "little", signed=True))
    check_other(value, key)
    if kind is np.ndarray:
        return msgpack.ExtType(ARRAY, _encode_array_content(value))
    if kind is type:
        return msgpack.ExtType(CONTAINER_TYPE, TYPE_NAMES[value].encode())
    return msgpack.ExtType(SCALAR, _encode_scalar_content(value))


def decode_other(code: int, content: bytes) -> Any:
    """Returns the value of an extension type.

    Raises:
        RemoteProtocolError: ``encode_other`` makes no such extension.
    """
    if code == TUPLE and not content:
        return _MARK
    if code == BIG_INT:
        return int.from_bytes(content, "little", signed=True)
    if code == ARRAY:
        return _read_array(content)
    if code == SCALAR:
        return _read_scalar(content)
    if code == CONTAINER_TYPE:
        return _read_container_type(content)
    raise RemoteProtocolError(expected="a value", received=f"extension type {code} of {len(content)} bytes")


def unmark(items: list[Any]) -> list[Any] | tuple[Any, ...]:
    """Returns the list, or the tuple that it represents."""
    return tuple(items[1:]) if items and items[0] is _MARK else items


def _encode_array_content(value: np.ndarray[Any, Any]) -> bytes:
    shape = np.array(value.shape, "<i8").tobytes()
    flat = np.ascontiguousarray(value).reshape(-1)
    return b"".join((_encode_head(value.dtype.str), bytes([value.ndim]), shape, flat.view(np.uint8)))  # type: ignore[arg-type]


def _encode_scalar_content(value: np.generic) -> bytes:
    # NumPy cuts trailing zeros off the strings that it reads from memory, so those two travel as what they are
    if isinstance(value, np.str_):
        return _encode_head(f"<U{len(value)}") + value.encode("utf-32-le", "surrogatepass")  # str(value) cuts them too
    if isinstance(value, np.bytes_):
        return _encode_head(f"|S{len(value)}") + value[:]
    return _encode_head(value.dtype.str) + value.tobytes()


def _encode_head(dtype: str) -> bytes:
    return bytes([len(dtype)]) + dtype.encode()


def _read_container_type(content: bytes) -> type:
    found = CONTAINER_TYPES.get(content.decode(errors="replace"))
    if found is None:
        raise RemoteProtocolError(expected="the type of a container", received=repr(content)[:200])
    return found


def _read_array(content: bytes) -> np.ndarray[Any, Any]:
    """Returns the array, fresh and writable."""
    dtype, at = _read_dtype(content)
    ndim = content[at] if at < len(content) else 255
    start = at + 1 + _SIZE_BYTES * ndim
    if start > len(content):
        raise _make_array_error(dtype, "no shape")
    shape = tuple(np.frombuffer(content, "<i8", ndim, at + 1).tolist())
    data = bytearray(memoryview(content)[start:])  # the array's own memory, writable
    return _make_array(dtype, shape, data)


def _make_array(dtype: np.dtype[Any], shape: tuple[int, ...], data: bytearray) -> np.ndarray[Any, Any]:
    if dtype.itemsize == 0 or math.prod(shape) * dtype.itemsize != len(data):
        raise _make_array_error(dtype, f"{len(data)} bytes for the shape {list(shape)[:64]}")
    try:
        array: np.ndarray[Any, Any] = np.ndarray(shape, dtype, buffer=data)
    except (ValueError, TypeError) as error:
        raise _make_array_error(dtype, str(error)) from None
    if dtype.kind == "b" and data and int(np.frombuffer(data, dtype=np.uint8).max()) > 1:
        raise _make_array_error(dtype, "booleans that are neither 0 nor 1")
    if dtype.kind == "U" and data and int(np.frombuffer(data, dtype=f"{dtype.str[0]}u4").max()) > 0x10FFFF:
        raise _make_array_error(dtype, "code points that unicode does not have")
    return array


def _read_scalar(content: bytes) -> Any:
    dtype, at = _read_dtype(content)
    data = content[at:]
    if dtype.itemsize != len(data):
        raise _make_array_error(dtype, f"{len(data)} bytes for a scalar")
    if dtype.kind == "U":
        try:
            return np.str_(data.decode("utf-32-le" if dtype.str[0] == "<" else "utf-32-be", "surrogatepass"))
        except UnicodeDecodeError as error:
            raise _make_array_error(dtype, str(error)) from None
    if dtype.kind == "S":
        return np.bytes_(data)
    return _make_array(dtype, (), bytearray(data))[()]


def _read_dtype(content: bytes) -> tuple[np.dtype[Any], int]:
    """Returns the dtype in front, and where it ends."""
    end = 1 + content[0] if content else 0
    text = content[1:end].decode("ascii", "replace")
    if not _DTYPE.fullmatch(text):
        raise RemoteProtocolError(expected="a NumPy dtype of numbers or strings", received=repr(text[:80]))
    try:
        dtype: np.dtype[Any] = np.dtype(text)
    except (TypeError, ValueError) as error:
        raise RemoteProtocolError(expected="a NumPy dtype", received=f"{text!r}: {error}"[:200]) from None
    if dtype.char in UNPORTABLE:
        raise RemoteProtocolError(expected="a portable NumPy dtype", received=text)
    return dtype, end


def _make_array_error(dtype: np.dtype[Any], received: str) -> RemoteProtocolError:
    return RemoteProtocolError(expected=f"a NumPy value of dtype {dtype}", received=received)
