"""The bytes of ``Value`` messages, written by hand: a tenth of the calls that the message classes need.

They are the bytes that protobuf writes. What is not common is left to ``tdserve.values.messages``.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Sequence
from itertools import chain, cycle
from operator import is_
from typing import Any, NamedTuple

import numpy as np
from google.protobuf.message import EncodeError

from tdserve.base.errors import NotSupportedError
from tdserve.values.messages import MAX_DEPTH, encode_value

_MAX_MESSAGE_BYTES = 2**31 - 1
"""What protobuf takes."""

_MAX_KEY_BYTES = 64
_MAX_KEYS = 4096
"""Keys of dicts repeat from value to value: up to so many are kept with their bytes."""

_DOUBLE = struct.Struct("<d")

MIN_TOGETHER = 8
"""Fewer values are written one by one."""


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
    return _check_size(data, key)


def encode_common(values: Sequence[Any]) -> list[bytes] | None:
    """``encode`` of each, when all of them are common and short; else None."""
    try:
        blobs = _write_many(values, MAX_DEPTH)
    except (KeyError, _Uncommon):
        return None
    return blobs if max(map(len, blobs), default=0) <= _MAX_MESSAGE_BYTES else None


def _write_many(values: Sequence[Any], depth: int) -> list[bytes]:
    """The message of each; where all are texts, or dicts of the same keys, written together."""
    kinds = set(map(type, values))
    if len(kinds) == 1 and len(values) >= MIN_TOGETHER:
        if str in kinds:
            return _write_texts(values)
        if dict in kinds and (names := _names_of(values)) is not None:
            return _write_dicts(values, names, depth)
    writers = _WRITERS
    return [writers[type(value)](value, depth) for value in values]


def pickled(content: bytes, *, key: str = "") -> bytes:
    """The serialised message of a value that was pickled.

    Raises:
        NotSupportedError: It has 2 GiB or more.
    """
    return _check_size(_field(b"\x72", content), key)


def _check_size(data: bytes, key: str) -> bytes:
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


class _Heads(dict[int, bytes]):
    """What stands before contents of the same key, by their size: made when it is first needed.

    Args:
        tags: Of the fields that lie around the content, the innermost first, each with what comes before it.
    """

    def __init__(self, *tags: tuple[bytes, bytes]) -> None:
        super().__init__()
        self._tags = tags

    def __missing__(self, size: int) -> bytes:
        head, nbytes = b"", size
        for tag, before in self._tags:
            head = before + tag + varint(nbytes) + head
            nbytes = size + len(head)
        if size < _NUM_SHORT:
            self[size] = head
        return head


class _Pairs(NamedTuple):
    """What stands before the values of one key of dicts.

    Attributes:
        texts: Before UTF-8.
        messages: Before the message of a value.
        real: Before the eight bytes of a float.
        flags: Whole pairs of booleans.
    """

    texts: _Heads
    messages: _Heads
    real: bytes
    flags: dict[bool, bytes]

    @classmethod
    def of(cls, name: str) -> _Pairs:
        data = _NAMES_WRITTEN.get(name) or _write_name(name)
        messages = _Heads((b"\x12", data), (b"\x0a", b""))
        flags = {flag: messages[2] + _write_bool(flag, 0) for flag in (False, True)}
        texts = _Heads((b"\x32", b""), (b"\x12", data), (b"\x0a", b""))
        return cls(texts, messages, messages[9] + b"\x29", flags)


class _Ints(dict[int, bytes]):
    """The messages of integers; small ones are kept."""

    def __missing__(self, value: int) -> bytes:
        data = _write_int(value, 0)
        if 0 <= value < _MAX_KEYS:
            self[value] = data
        return data


_INTS = _Ints()
_TEXTS = _Heads((b"\x32", b""))
_DICTS = _Heads((b"\x52", b""))

_PAIRS: dict[str, _Pairs] = {}
_MAX_PAIRS = 256
"""Each may hold heads of some 2,000 sizes."""


def _write_texts(texts: Iterable[str]) -> list[bytes]:
    try:
        heads = _TEXTS
        return [heads[len(data)] + data for data in map(str.encode, texts)]
    except UnicodeEncodeError:
        return [_write_text(text, 0) for text in texts]


def _names_of(dicts: Sequence[dict[Any, Any]]) -> tuple[str, ...] | None:
    """The keys of all of them; None where they differ, or some are no texts."""
    names = tuple(dicts[0])
    is_as_long = set(map(len, dicts)) == {len(names)}
    if is_as_long and all(map(is_, chain.from_iterable(dicts), cycle(names))):  # as of literals: the same objects
        return names if {str}.issuperset(map(type, names)) else None
    if any(tuple(each) != names for each in dicts):
        return None
    return names if {str}.issuperset(map(type, chain.from_iterable(dicts))) else None


def _write_dicts(dicts: Sequence[dict[str, Any]], names: Sequence[str], depth: int) -> list[bytes]:
    """Key by key, which takes half as long as dict by dict."""
    if depth <= 0:
        raise _Uncommon
    heads = _DICTS
    if not names:
        return [heads[0]] * len(dicts)
    columns = zip(*[each.values() for each in dicts], strict=True)
    pairs = [_write_pairs(name, column, depth - 3) for name, column in zip(names, columns, strict=True)]
    bodies = map(b"".join, zip(*pairs, strict=True))
    return [heads[len(body)] + body for body in bodies]


def _write_pairs(name: str, values: Sequence[Any], depth: int) -> list[bytes]:
    """The pair of a key with each value."""
    pairs = _PAIRS.get(name)
    if pairs is None:
        if len(_PAIRS) >= _MAX_PAIRS:
            _PAIRS.clear()
        pairs = _PAIRS[name] = _Pairs.of(name)
    kinds = set(map(type, values))
    kind = kinds.pop() if len(kinds) == 1 else None
    if kind is str:
        heads = pairs.texts
        try:
            return [heads[len(data)] + data for data in map(str.encode, values)]
        except UnicodeEncodeError:
            pass
    if kind is float:
        head = pairs.real
        return [head + data for data in map(_DOUBLE.pack, values)]
    if kind is bool:
        return [pairs.flags[value] for value in values]
    heads = pairs.messages
    ints = _INTS
    messages = [ints[value] for value in values] if kind is int else _write_many(values, depth)
    return [heads[len(data)] + data for data in messages]


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
