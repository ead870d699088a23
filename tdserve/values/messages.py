"""Non-tensor values as messages: a closed set of types, each coming back as exactly what it was. No pickle, no torch.

What is not in the set is refused, subclasses too: a value that came back as something else would be worse. These are
the rules; ``encoding`` and ``decoding`` make and read the same bytes faster.
"""

from __future__ import annotations

import collections
import math
import re
from collections.abc import Iterable
from typing import Any

import numpy as np

from tdserve.base.errors import NotSupportedError, RemoteProtocolError
from tdserve.v1 import content_pb2

MAX_DEPTH = 90
"""Nested messages of a value: a list or tuple takes two levels, a dict three. Protobuf's parser stops at 100, and some
belong to the messages around a value. So lists go 44 deep, dicts 29."""

ATOMS = frozenset({type(None), bool, int, float, str, bytes})
"""Types that always travel and hold nothing else."""

_ARRAY_KINDS = frozenset("biufcSUMm")
"""NumPy's dtype.kind of arrays and scalars that are their bytes: no objects, no pointers, no fields."""

CONTAINER_TYPES: dict[str, type] = {
    kind.__name__: kind for kind in (dict, list, tuple, collections.OrderedDict, collections.defaultdict)
}
"""Types that travel themselves, by name: what ``TensorDict.from_pytree`` notes of containers. No others ever do: what
the wire names is never imported."""

_TYPE_NAMES = {kind: name for name, kind in CONTAINER_TYPES.items()}

_UNPORTABLE = frozenset("gG")
"""NumPy's dtype.char of long double and its complex: their bytes mean something else on another machine."""

_DTYPE = re.compile(r"[<>|][biufcSUMm]\d{1,10}(\[\d{0,10}[a-zA-Z]{1,2}\])?")

_INT64 = range(-(2**63), 2**63)


def check_value(value: Any, *, key: str = "") -> None:
    """Raises what ``encode_value`` would raise, without encoding.

    Raises:
        NotSupportedError: Names ``key`` and the type.
    """
    if type(value) not in ATOMS:
        _check(value, key, MAX_DEPTH)


def encode_value(value: Any, *, key: str = "") -> content_pb2.Value:
    """The message of a value.

    Args:
        value: None, bool, int, float, str, bytes, list, tuple, dict, a NumPy array or a NumPy scalar, of exactly that
            type; containers may be nested (see ``MAX_DEPTH``) and dicts may have any such keys. Or one of
            ``CONTAINER_TYPES``.
        key: Where the value lies, for the message of an error.

    Raises:
        NotSupportedError: Names ``key`` and the type. Nothing was changed.
    """
    check_value(value, key=key)
    message = content_pb2.Value()
    _write(value, message)
    return message


def decode_value(message: content_pb2.Value) -> Any:
    """The value of a message, equal in type and content to the encoded one; arrays are fresh and writable.

    Raises:
        RemoteProtocolError: The message is none that ``encode_value`` makes. Never raises anything else.
    """
    kind = message.WhichOneof("kind")
    if kind is None:
        raise RemoteProtocolError(expected="a value", received="nothing that this version knows")
    if kind in ("boolean", "small_int", "real", "text", "raw"):
        return getattr(message, kind)
    if kind == "none":
        return None
    if kind == "list":
        return [decode_value(item) for item in message.list.items]
    if kind == "tuple":
        return tuple(decode_value(item) for item in message.tuple.items)
    if kind == "dict":
        return _read_dict(message.dict)
    if kind == "big_int":
        return int.from_bytes(message.big_int, "little", signed=True)
    if kind == "surrogate_text":
        return _read_text(message.surrogate_text, "utf-8")
    if kind == "container_type":
        return _read_container_type(message.container_type)
    if kind == "pickled":
        raise RemoteProtocolError(expected="a value", received="a pickled one inside of another")
    return decode_array(message.ndarray) if kind == "ndarray" else decode_scalar(message.scalar)


def _check(value: Any, key: str, depth: int) -> None:
    kind = type(value)
    if kind in ATOMS or (kind is type and value in _TYPE_NAMES):
        return
    if depth <= 0:
        raise NotSupportedError(feature=f"the value at key {key!r}", reason="its containers are nested too deep")
    if kind is list or kind is tuple:
        for item in value:
            _check(item, key, depth - 2)
    elif kind is dict:
        for name, item in value.items():
            _check(name, key, depth - 3)
            _check(item, key, depth - 3)
    elif kind is not np.ndarray and not (isinstance(value, np.generic) and kind.__module__ == "numpy"):
        reason = "None, bool, int, float, str, bytes, list, tuple, dict, NumPy arrays and scalars travel; convert it"
        raise NotSupportedError(feature=f"a {kind.__module__}.{kind.__qualname__} at key {key!r}", reason=reason)
    elif value.dtype.kind not in _ARRAY_KINDS or value.dtype.char in _UNPORTABLE or _is_hollow(value):
        reason = "arrays of numbers, bool, str, bytes, datetime64 and timedelta64 travel"
        raise NotSupportedError(feature=f"a NumPy value of dtype {value.dtype} at key {key!r}", reason=reason)


def _is_hollow(value: Any) -> bool:
    # arrays of strings without characters hold no bytes, so that no bytes could vouch for their number
    return type(value) is np.ndarray and value.dtype.itemsize == 0


def _write(value: Any, message: content_pb2.Value) -> None:
    kind = type(value)
    if value is None:
        message.none = True
    elif kind is bool:
        message.boolean = value
    elif kind is int:
        _write_int(value, message)
    elif kind is float:
        message.real = value
    elif kind is str:
        _write_text(value, message)
    elif kind is bytes:
        message.raw = value
    elif kind is list:
        _write_all(value, message.list)
    elif kind is tuple:
        _write_all(value, message.tuple)
    elif kind is dict:
        message.dict.SetInParent()
        for name, item in value.items():
            pair = message.dict.items.add()
            _write(name, pair.key)
            _write(item, pair.value)
    else:
        _write_other(value, kind, message)


def _write_other(value: Any, kind: type, message: content_pb2.Value) -> None:
    if kind is np.ndarray:
        _write_array(value, message.ndarray)
    elif kind is type:
        message.container_type = _TYPE_NAMES[value]
    else:
        _write_scalar(value, message.scalar)


def _write_int(value: int, message: content_pb2.Value) -> None:
    if value in _INT64:
        message.small_int = value
    else:
        bits = (value if value >= 0 else ~value).bit_length() + 1  # one for the sign
        message.big_int = value.to_bytes(-(-bits // 8), "little", signed=True)


def _write_text(value: str, message: content_pb2.Value) -> None:
    try:
        message.text = value
    except UnicodeEncodeError:
        message.surrogate_text = value.encode("utf-8", "surrogatepass")


def _write_all(values: Iterable[Any], message: content_pb2.Values) -> None:
    message.SetInParent()  # an empty list is not an absent one
    for value in values:
        _write(value, message.items.add())


def _write_array(value: Any, message: content_pb2.NDArray) -> None:
    message.dtype = value.dtype.str
    message.shape.extend(value.shape)
    message.data = value.tobytes("C")


def _write_scalar(value: np.generic, message: content_pb2.NDArray) -> None:
    # NumPy cuts trailing zeros off the strings that it reads from memory, so those two travel as what they are
    if isinstance(value, np.str_):
        message.dtype = f"<U{len(value)}"
        message.data = value.encode("utf-32-le", "surrogatepass")  # str(value) would cut them off as well
    elif isinstance(value, np.bytes_):
        message.dtype = f"|S{len(value)}"
        message.data = value[:]
    else:
        message.dtype = value.dtype.str
        message.data = value.tobytes()


def _read_container_type(name: str) -> type:
    if name not in CONTAINER_TYPES:
        raise RemoteProtocolError(expected="the type of a container", received=repr(name)[:200])
    return CONTAINER_TYPES[name]


def _read_dict(message: content_pb2.Pairs) -> dict[Any, Any]:
    try:
        found = {decode_value(pair.key): decode_value(pair.value) for pair in message.items}
    except TypeError as error:
        raise RemoteProtocolError(expected="keys that can be hashed", received=str(error)) from None
    if len(found) != len(message.items):
        raise RemoteProtocolError(expected="keys that differ", received=f"{len(message.items)} with duplicates")
    return found


def _read_text(data: bytes, encoding: str) -> str:
    try:
        return data.decode(encoding, "surrogatepass")
    except UnicodeDecodeError as error:
        raise RemoteProtocolError(expected=f"text in {encoding}", received=str(error)) from None


def decode_array(message: content_pb2.NDArray) -> np.ndarray[Any, Any]:
    """The array of a message, fresh and writable.

    Raises:
        RemoteProtocolError: The message is none that ``encode_value`` makes.
    """
    dtype = _read_dtype(message.dtype)
    shape = tuple(message.shape)
    if dtype.itemsize == 0 or any(size < 0 for size in shape) or math.prod(shape) * dtype.itemsize != len(message.data):
        raise _not_an_array(message, f"{len(message.data)} bytes")
    data = bytearray(message.data)  # the array's own memory, writable
    try:
        array: np.ndarray[Any, Any] = np.ndarray(shape, dtype, buffer=data)
    except (ValueError, TypeError) as error:
        raise _not_an_array(message, str(error)) from None
    if dtype.kind == "b" and data and int(np.frombuffer(data, dtype=np.uint8).max()) > 1:
        raise _not_an_array(message, "booleans that are neither 0 nor 1")
    if dtype.kind == "U" and data:
        points = np.frombuffer(data, dtype=f"{dtype.str[0]}u4")
        if int(points.max()) > 0x10FFFF:
            raise _not_an_array(message, "code points that unicode does not have")
    return array


def decode_scalar(message: content_pb2.NDArray) -> Any:
    """The NumPy scalar of a message.

    Raises:
        RemoteProtocolError: The message is none that ``encode_value`` makes.
    """
    dtype = _read_dtype(message.dtype)
    if message.shape or dtype.itemsize != len(message.data):
        raise _not_an_array(message, f"{len(message.data)} bytes for a scalar")
    if dtype.kind == "U":
        return np.str_(_read_text(message.data, "utf-32-le" if dtype.str[0] == "<" else "utf-32-be"))
    if dtype.kind == "S":
        return np.bytes_(message.data)
    return decode_array(message)[()]


def _read_dtype(text: str) -> np.dtype[Any]:
    if not _DTYPE.fullmatch(text):
        raise RemoteProtocolError(expected="a NumPy dtype of numbers or strings", received=repr(text[:80]))
    try:
        dtype: np.dtype[Any] = np.dtype(text)
    except (TypeError, ValueError) as error:
        raise RemoteProtocolError(expected="a NumPy dtype", received=f"{text!r}: {error}"[:200]) from None
    if dtype.char in _UNPORTABLE:
        raise RemoteProtocolError(expected="a portable NumPy dtype", received=text)
    return dtype


def _not_an_array(message: content_pb2.NDArray, received: str) -> RemoteProtocolError:
    expected = f"an array of dtype {message.dtype} and shape {list(message.shape)[:64]}"
    return RemoteProtocolError(expected=expected, received=received)
