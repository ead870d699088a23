"""Non-tensor values as bytes: each comes back as exactly what it was. No torch.

A closed set of types always travels (see ``encode_bytes``). What is not in the set, subclasses included, is refused,
unless both the writer and the reader said ``allow_pickle=True``: then the whole value is one pickle.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tdserve.base.errors import NotSupportedError
from tdserve.values import decoding, encoding, messages, pickled

_REMEDY = "tdserve.connect(..., allow_pickle=True)"


def check_values(values: Sequence[Any], *, key: str = "") -> None:
    """Raises what ``encode_many`` would raise about the types, without encoding.

    Raises:
        NotSupportedError: Names ``key`` and the type.
    """
    if messages.ATOMS.issuperset(map(type, values)):
        return
    try:
        for value in values:
            messages.check_value(value, key=key)
    except NotSupportedError as error:
        raise _with_remedy(error) from None


def encode_bytes(value: Any, *, key: str = "", allow_pickle: bool = False) -> bytes:
    """The serialised message of a value.

    Args:
        value: None, bool, int, float, str, bytes, list, tuple, dict, a NumPy array or a NumPy scalar, of exactly that
            type; containers may be nested (see ``messages.MAX_DEPTH``) and dicts may have any such keys.
        key: Where the value lies, for the message of an error.
        allow_pickle: Whether any other value is pickled instead of refused.

    Raises:
        NotSupportedError: Names ``key`` and the type; or the value has 2 GiB or more. Nothing was changed.
    """
    try:
        return encoding.encode(value, key=key)
    except NotSupportedError as error:
        if not allow_pickle:
            raise _with_remedy(error) from None
    return encoding.pickled(pickled.dump(value, key=key), key=key)


def decode_bytes(data: bytes, *, key: str = "", allow_pickle: bool = False) -> Any:
    """The value of a serialised message, equal in type and content to the encoded one; arrays are fresh and writable.

    Args:
        data: The message.
        key: Where the value lies, for the message of an error.
        allow_pickle: Whether a pickled value is unpickled, which runs code that the bytes choose.

    Raises:
        RemoteProtocolError: The bytes are no such message.
        NotSupportedError: The value is pickled, and ``allow_pickle`` is False, or it cannot be unpickled here.
    """
    if not data or data[0] != decoding.PICKLED:
        return decoding.decode(data)
    if not allow_pickle:
        raise NotSupportedError(
            feature=f"the value at key {key!r}", reason=f"it was pickled by its writer; to unpickle it, use {_REMEDY}"
        )
    return pickled.load(decoding.pickled_content(data), key=key)


def is_same(left: Any, right: Any) -> bool:
    """Whether two values are equal in type and content; False for those that only a pickle could carry."""
    try:
        return encoding.encode(left) == encoding.encode(right)
    except NotSupportedError:
        return False


def encode_many(values: Sequence[Any], *, key: str = "", allow_pickle: bool = False) -> list[bytes]:
    """``encode_bytes`` of each."""
    blobs = encoding.encode_common(values)
    if blobs is not None:
        return blobs
    return [encode_bytes(value, key=key, allow_pickle=allow_pickle) for value in values]


def decode_many(blobs: Sequence[bytes], *, key: str = "", allow_pickle: bool = False) -> list[Any]:
    """``decode_bytes`` of each."""
    values = decoding.decode_common(blobs)
    if values is not None:
        return values
    return [decode_bytes(data, key=key, allow_pickle=allow_pickle) for data in blobs]


def _with_remedy(error: NotSupportedError) -> NotSupportedError:
    return NotSupportedError(feature=error.feature, reason=f"{error.reason}; or use {_REMEDY}")
