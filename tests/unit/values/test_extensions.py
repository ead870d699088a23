"""Extension types with malformed content; test_codec.py tests that well-formed ones come back."""

from __future__ import annotations

import msgpack
import numpy as np
import pytest

from tdserve.base.errors import RemoteProtocolError
from tdserve.values.extensions import (
    ARRAY,
    BIG_INT,
    COMPLEX,
    CONTAINER_TYPE,
    DATE,
    DATETIME,
    FROZENSET,
    SCALAR,
    SET,
    TIME,
    TIMEDELTA,
)
from tdserve.values.value_codec import decode_value


def record(code: int, content: bytes) -> bytes:
    """A value of an extension type."""
    data: bytes = msgpack.packb(msgpack.ExtType(code, content))
    return data


def array(dtype: str, shape: list[int], data: bytes) -> bytes:
    """The record of an array."""
    sizes = np.array(shape, "<i8").tobytes()
    return record(ARRAY, bytes([len(dtype)]) + dtype.encode() + bytes([len(shape)]) + sizes + data)


def scalar(dtype: str, data: bytes) -> bytes:
    """The record of a scalar."""
    return record(SCALAR, bytes([len(dtype)]) + dtype.encode() + data)


def test_array_when_written_by_hand_then_is_read() -> None:
    found = decode_value(array("<i2", [2, 1], b"\x01\x00\x02\x00"))
    assert found.dtype.str == "<i2"
    assert found.tolist() == [[1], [2]]
    assert decode_value(scalar("<i2", b"\x01\x00")) == np.int16(1)
    assert decode_value(record(BIG_INT, b"\xff")) == -1


@pytest.mark.parametrize(
    "wire",
    [
        array("|O", [1], b"12345678"),
        array("|V8", [1], b"12345678"),
        array("f4,f4", [1], b"12345678"),
        array("<f16", [1], b"0" * 16),
        array("<f3", [1], b"123"),
        array("<M8[parsec]", [1], b"12345678"),
        array("<M8[xy]", [1], b"12345678"),
        array("", [1], b""),
        array("<f4", [2], b"1234"),
        array("<f4", [-1, -1], b"1234"),
        array("<f4", [2**62, 2**62, 0], b""),
        array("<f4", [1] * 70, b"1234"),
        array("<U0", [2**40], b""),
        array("<U9999999999", [0], b""),
        array("|b1", [1], b"\x02"),
        array("<U1", [1], b"\xff\xff\xff\xff"),
        scalar("<f8", b"123"),
        scalar("<U1", b"\xff\xff\xff\xff"),
        scalar("|b1", b"\x07"),
        record(ARRAY, b""),
        record(ARRAY, b"\x03<f4"),
        record(ARRAY, b"\x03<f4\x02" + bytes(15)),
        record(ARRAY, b"\xff<f4"),
        record(SCALAR, b""),
        record(CONTAINER_TYPE, b"set"),
        record(CONTAINER_TYPE, b""),
        record(CONTAINER_TYPE, b"os.system"),
        record(CONTAINER_TYPE, b"\xff"),
        record(0, b""),
        record(99, b"12345678"),
        msgpack.packb([msgpack.ExtType(SET, b""), {}]),
        msgpack.packb([0, msgpack.ExtType(FROZENSET, b"")]),
        record(COMPLEX, b"12345678"),
        record(DATE, b"\xff\xff\xff\x7f"),
        record(TIME, b"\x19" + bytes(7)),
        record(DATETIME, b"\xff"),
        record(DATETIME, b"\1" + bytes(11) + b"\x7f" * 8),
        record(TIMEDELTA, b"\xff\xff\xff\x7f" * 3),
    ],
)
def test_extension_when_hostile_then_raises_the_peers_error(wire: bytes) -> None:
    with pytest.raises(RemoteProtocolError):
        decode_value(wire)
