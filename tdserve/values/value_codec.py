"""Encodes non-tensor values as bytes and restores them exactly. No torch.

A value is one MessagePack record. ``extensions`` defines what MessagePack lacks; ``supported`` lists the types that
always travel. A value of any other type, subclasses included, is refused, unless both the writer and the reader pass
``allow_pickle=True``: then the whole value is one pickle.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import msgpack

from tdserve.base.errors import NotSupportedError, RemoteProtocolError
from tdserve.values import pickled
from tdserve.values.extensions import decode_other, encode_other, unmark
from tdserve.values.supported import ATOMS, REMEDY, check_values
from tdserve.values.value_columns import Buffer, JoinedValues, ValueColumn, encode_block

NONE = b"\xc0"
"""The record of None."""

PICKLED = 0xC1
"""First byte of a pickled value. No MessagePack record begins with it."""

_MAX_BYTES = 2**31 - 1

_MAX_SCANNED_BYTES = 2 * 1024 * 1024
"""Records up to this size are scanned before they are decoded; the scan builds nothing and takes a tenth of the time.

The decoder allocates each list by the length that the bytes claim, up to 80 KB, and nests up to 1,024 of them. These
80 MB are too much for a short record; the bytes of a longer one justify them.
"""

_BUFFER_BYTES = 4096
"""Initial buffer of a packer; it grows."""

_COMPARED = ATOMS - {float}
"""Types whose equal values are the same value. Floats are excluded: 0.0 equals -0.0, and nan does not equal nan."""

_FAULTS = (ValueError, TypeError, RecursionError, msgpack.UnpackException)
"""Errors that hostile bytes raise: TypeError for a key that cannot be hashed, ValueError for invalid UTF-8,
RecursionError for keys that are deeply nested tuples, and so on."""


def encode_value(value: Any, *, key: str = "", allow_pickle: bool = False) -> bytes:
    """Returns the record of a value.

    Args:
        value: One of ``supported.TRAVELLING``, of exactly that type; containers may be nested (see
            ``supported.MAX_DEPTH``) and dicts may have any such keys. Or one of ``supported.CONTAINER_TYPES``.
        key: Where the value lies, for the message of an error.
        allow_pickle: Whether any other value is pickled instead of refused.

    Raises:
        NotSupportedError: Names ``key`` and the type; or the value has 2 GiB or more. Nothing was changed.
    """
    return encode_many((value,), key=key, allow_pickle=allow_pickle)[0]


def encode_many(values: Sequence[Any], *, key: str = "", allow_pickle: bool = False) -> list[bytes]:
    """Returns the record of each value, as ``encode_value`` does."""
    try:
        check_values(values, key=key)
        return _pack(values, key)
    except NotSupportedError:
        if not allow_pickle:
            raise
    if len(values) > 1:
        return [encode_value(value, key=key, allow_pickle=True) for value in values]
    found = [bytes([PICKLED]) + pickled.dump(value, key=key) for value in values]
    _check_size(max(map(len, found), default=0), key)
    return found


def decode_value(data: Buffer, *, key: str = "", allow_pickle: bool = False) -> Any:
    """Returns the value of a record, equal in type and content to the encoded one; arrays are fresh and writable.

    Args:
        data: The record.
        key: Where the value lies, for the message of an error.
        allow_pickle: Whether a pickled value is unpickled, which runs code that the bytes choose.

    Raises:
        RemoteProtocolError: The bytes are no such record.
        NotSupportedError: The value is pickled, and ``allow_pickle`` is False, or it cannot be unpickled here.
    """
    if not data or data[0] != PICKLED:
        return _read_long(data) if len(data) > _MAX_SCANNED_BYTES else _read((data,), (len(data),))[0]
    if not allow_pickle:
        raise NotSupportedError(
            feature=f"the value at key {key!r}", reason=f"it was pickled by its writer; to unpickle it, use {REMEDY}"
        )
    return pickled.load(memoryview(data)[1:], key=key)


def decode_many(blobs: Sequence[bytes], *, key: str = "", allow_pickle: bool = False) -> list[Any]:
    """Decodes each record as ``decode_value`` does. Values that are not large are decoded in one pass, unless one
    of them is pickled."""
    parts: Sequence[Buffer] = blobs
    if isinstance(blobs, JoinedValues) and not blobs.heads:
        sizes, nbytes = blobs.sizes.tolist(), int(blobs.sizes.sum())
        parts = blobs.get_views() if nbytes > _MAX_SCANNED_BYTES else blobs.get_parts()
    else:
        sizes = list(map(len, blobs))
        nbytes = sum(sizes)
    if nbytes <= _MAX_SCANNED_BYTES:
        try:
            return _read(parts, sizes)
        except RemoteProtocolError:
            parts = blobs  # one is pickled or damaged: decode each by itself
    return [decode_value(data, key=key, allow_pickle=allow_pickle) for data in parts]


def is_same(left: Any, right: Any) -> bool:
    """Returns whether two values are equal in type and content; False for those that only a pickle could carry."""
    if type(left) is not type(right):
        return False
    if type(left) in _COMPARED:
        return bool(left == right)
    try:
        return encode_many((left,)) == encode_many((right,))
    except NotSupportedError:
        return False


def _pack(values: Sequence[Any], key: str) -> list[bytes]:
    try:
        try:
            packed = _pack_all(values, key)
        except UnicodeEncodeError:
            packed = _pack_all(values, key, unicode_errors="surrogatepass")  # which takes twice the time
    except (ValueError, OverflowError) as error:
        raise NotSupportedError(
            feature=f"the value at key {key!r}", reason=f"MessagePack cannot carry it: {error}"
        ) from None
    _check_size(max(map(len, packed), default=0), key)
    return packed


def _pack_all(values: Sequence[Any], key: str, **how: Any) -> list[bytes]:
    # Each call has its own packer, since another thread may run while it calls ``encode_other``. Without a way to treat
    # errors it copies text straight from the strings; those that are not ASCII keep their UTF-8 form from then on.
    other = partial(encode_other, key=key)
    return list(map(msgpack.Packer(default=other, strict_types=True, buf_size=_BUFFER_BYTES, **how).pack, values))


def _check_size(nbytes: int, key: str) -> None:
    if nbytes > _MAX_BYTES:
        raise NotSupportedError(feature=f"the value at key {key!r}", reason=f"{nbytes} bytes are 2 GiB or more")


def _read(parts: Sequence[Buffer], sizes: Sequence[int]) -> list[Any]:
    """Returns the values of concatenated records.

    Args:
        parts: The records, cut anywhere.
        sizes: Bytes of each record.

    Raises:
        RemoteProtocolError: The bytes are not records, or a record has another size than in ``sizes``.
    """
    content = parts[0] if len(parts) == 1 else b"".join(parts)
    room = max(len(content), 1)
    reader = msgpack.Unpacker(read_size=room, max_buffer_size=room, **_OPTIONS)
    end = 0
    try:
        reader.feed(content)
        for size in sizes:
            reader.skip()
            end += size
            if reader.tell() != end:
                raise _make_record_error(f"one of other than {size} bytes")
        reader.feed(content)
        values = list(reader)
    except _FAULTS as error:
        raise _make_record_error(f"{type(error).__name__}: {error}") from None
    return _check_read(values)


def _read_long(data: Buffer) -> Any:
    try:
        value = msgpack.unpackb(data, **_OPTIONS)
    except _FAULTS as error:
        raise _make_record_error(f"{type(error).__name__}: {error}") from None
    return _check_read([value])[0]


def _check_read(values: list[Any]) -> list[Any]:
    try:
        check_values(values)
    except NotSupportedError as error:
        raise _make_record_error(f"{error.feature}: {error.reason}") from None
    return values


def _read_dict(pairs: list[tuple[Any, Any]]) -> dict[Any, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise RemoteProtocolError(expected="keys that differ", received=f"{len(pairs)} with duplicates")
    return found


_OPTIONS: dict[str, Any] = {
    "strict_map_key": False,
    "unicode_errors": "surrogatepass",
    "ext_hook": decode_other,
    "list_hook": unmark,
    "object_pairs_hook": _read_dict,
}


def _make_record_error(received: str) -> RemoteProtocolError:
    return RemoteProtocolError(expected="a value", received=received[:200])


def encode_nones(num_columns: int) -> bytes:
    """Returns a block of this many columns, in each of which all rows share None."""
    return encode_block([ValueColumn(False, [NONE])] * num_columns)
