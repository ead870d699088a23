"""Encodes as MessagePack extension types what MessagePack has no type for, and restores it. No torch."""

from __future__ import annotations

import datetime as dt
import math
import re
import struct
from collections.abc import Callable
from typing import Any, NamedTuple

import msgpack
import numpy as np

from tdserve.base.errors import RemoteProtocolError
from tdserve.values.supported import CONTAINER_TYPES, SETS, TYPE_NAMES, UNPORTABLE, check_other

BIG_INT, TUPLE, ARRAY, SCALAR, CONTAINER_TYPE, SET, FROZENSET, COMPLEX, DATE, TIME, DATETIME, TIMEDELTA = range(1, 13)

_DTYPE = re.compile(r"[<>|][biufcSUMm]\d{1,10}(\[\d{0,10}[a-zA-Z]{1,2}\])?")

_SIZE_BYTES = 8


class _Mark:
    """First item of a list that represents another container. It is no value: a record with one elsewhere is refused.

    Args:
        make: Makes the container of its items.
    """

    def __init__(self, make: Callable[[list[Any]], Any]) -> None:
        self.make = make


_CONTAINER_CODES: dict[type, int] = {tuple: TUPLE, set: SET, frozenset: FROZENSET}
_MARKS = {code: _Mark(kind) for kind, code in _CONTAINER_CODES.items()}
_PACKED_MARKS = {kind: msgpack.ExtType(code, b"") for kind, code in _CONTAINER_CODES.items()}

_TIME = struct.Struct("<BBBI?")
"""Hour, minute, second, microsecond, fold. Not as text: ``fromisoformat`` loses offsets below a second."""

_OFFSET = struct.Struct("<q")
"""Of a timezone, in microseconds; nothing where there is none."""

_MICROSECOND = dt.timedelta(microseconds=1)


def _write_time(value: dt.time | dt.datetime) -> bytes:
    content = _TIME.pack(value.hour, value.minute, value.second, value.microsecond, value.fold)
    offset = None if value.tzinfo is None else value.tzinfo.utcoffset(None)
    return content if offset is None else content + _OFFSET.pack(offset // _MICROSECOND)


def _read_time(content: bytes) -> dt.time:
    hour, minute, second, microsecond, fold = _TIME.unpack(content[: _TIME.size])
    offset = content[_TIME.size :]
    zone = dt.timezone(_MICROSECOND * _OFFSET.unpack(offset)[0]) if offset else None
    return dt.time(hour, minute, second, microsecond, zone, fold=fold)


def _write_date(value: dt.date) -> bytes:
    return struct.pack("<i", value.toordinal())


def _read_date(content: bytes) -> dt.date:
    return dt.date.fromordinal(*struct.unpack("<i", content))


class _ScalarForm(NamedTuple):
    """How a type of Python's scalars is written and read again."""

    kind: type
    code: int
    write: Callable[[Any], bytes]
    read: Callable[[bytes], Any]


_SCALAR_FORMS = (
    _ScalarForm(
        complex,
        COMPLEX,
        lambda value: struct.pack("<2d", value.real, value.imag),
        lambda content: complex(*struct.unpack("<2d", content)),
    ),
    _ScalarForm(dt.date, DATE, _write_date, _read_date),
    _ScalarForm(dt.time, TIME, _write_time, _read_time),
    _ScalarForm(
        dt.datetime,
        DATETIME,
        lambda value: _write_date(value) + _write_time(value),
        lambda content: dt.datetime.combine(_read_date(content[:4]), _read_time(content[4:])),
    ),
    _ScalarForm(
        dt.timedelta,
        TIMEDELTA,
        lambda value: struct.pack("<3i", value.days, value.seconds, value.microseconds),
        lambda content: dt.timedelta(*struct.unpack("<3i", content)),
    ),
)
_FORMS_BY_TYPE = {form.kind: form for form in _SCALAR_FORMS}
_FORMS_BY_CODE = {form.code: form for form in _SCALAR_FORMS}


def encode_other(value: Any, *, key: str = "") -> Any:
    """Returns the MessagePack equivalent of a value whose type the packer does not know.

    Raises:
        NotSupportedError: It does not travel; the error names ``key`` and the type.
    """
    kind = type(value)
    if (mark := _PACKED_MARKS.get(kind)) is not None:
        # Equal sets may differ in their order; their records should not.
        return [mark, *(sorted(value, key=repr) if kind in SETS else value)]
    if kind is int:  # of more than 64 bits
        bits = (value if value >= 0 else ~value).bit_length() + 1  # one for the sign
        return msgpack.ExtType(BIG_INT, value.to_bytes(-(-bits // 8), "little", signed=True))
    check_other(value, key)
    if kind is np.ndarray:
        return msgpack.ExtType(ARRAY, _encode_array_content(value))
    if (form := _FORMS_BY_TYPE.get(kind)) is not None:
        return msgpack.ExtType(form.code, form.write(value))
    if kind is type:
        return msgpack.ExtType(CONTAINER_TYPE, TYPE_NAMES[value].encode())
    return msgpack.ExtType(SCALAR, _encode_scalar_content(value))


def decode_other(code: int, content: bytes) -> Any:
    """Returns the value of an extension type.

    Raises:
        RemoteProtocolError: ``encode_other`` makes no such extension.
    """
    if code in _MARKS and not content:
        return _MARKS[code]
    if code == BIG_INT:
        return int.from_bytes(content, "little", signed=True)
    if code == ARRAY:
        return _read_array(content)
    if code == SCALAR:
        return _read_scalar(content)
    if code == CONTAINER_TYPE:
        return _read_container_type(content)
    if (form := _FORMS_BY_CODE.get(code)) is not None:
        return _read_python_scalar(form, content)
    raise RemoteProtocolError(expected="a value", received=f"extension type {code} of {len(content)} bytes")


def unmark(items: list[Any]) -> Any:
    """Returns the list, or the tuple or set that it represents."""
    return items[0].make(items[1:]) if items and type(items[0]) is _Mark else items


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


def _read_python_scalar(form: _ScalarForm, content: bytes) -> Any:
    try:
        return form.read(content)
    except (ValueError, OverflowError, struct.error) as error:
        raise RemoteProtocolError(
            expected=f"a value of extension type {form.code}", received=str(error)[:200]
        ) from None


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
