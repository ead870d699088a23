"""Values as message objects; what travels is tested in test_values.py, of which these are the rules."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings

from tdserve.base.errors import NotSupportedError, RemoteProtocolError
from tdserve.v1 import content_pb2
from tdserve.values.decoding import decode
from tdserve.values.encoding import encode
from tdserve.values.messages import CONTAINER_TYPES, check_value, decode_value, encode_value
from tests.unit.structure.strategies import same_value, values


@settings(max_examples=200, deadline=None)
@given(values)
def test_message_when_decoded_then_value_is_equal_in_type_and_content(value: Any) -> None:
    assert same_value(decode_value(encode_value(value)), value)


@pytest.mark.parametrize("value", [*CONTAINER_TYPES.values(), [dict, (list,)], {"k": tuple}])
def test_message_when_value_is_the_type_of_a_container_then_comes_back_as_it(value: Any) -> None:
    assert decode_value(encode_value(value)) == value
    assert decode(encode(value)) == value


@pytest.mark.parametrize("value", [{1}, [1j], int, set, type, {"k": (np.array([object()]),)}])
def test_message_when_a_type_does_not_travel_then_is_refused(value: Any) -> None:
    for ask in (check_value, encode_value):
        with pytest.raises(NotSupportedError, match="'my key'"):
            ask(value, key="my key")


def hostile_array(dtype: str, shape: list[int], data: bytes) -> content_pb2.Value:
    return content_pb2.Value(ndarray=content_pb2.NDArray(dtype=dtype, shape=shape, data=data))


def hostile_scalar(dtype: str, data: bytes, shape: list[int] | None = None) -> content_pb2.Value:
    return content_pb2.Value(scalar=content_pb2.NDArray(dtype=dtype, shape=shape, data=data))


def hostile_dict(*keys: content_pb2.Value) -> content_pb2.Value:
    return content_pb2.Value(
        dict=content_pb2.Pairs(items=[content_pb2.Pair(key=k, value=encode_value(1)) for k in keys])
    )


@pytest.mark.parametrize(
    "message",
    [
        content_pb2.Value(),
        content_pb2.Value(list=content_pb2.Values(items=[content_pb2.Value()])),
        content_pb2.Value(surrogate_text=b"\xff"),
        hostile_dict(encode_value([])),
        hostile_dict(encode_value(1), encode_value(1)),
        hostile_dict(content_pb2.Value()),
        hostile_array("|O", [1], b"12345678"),
        hostile_array("|V8", [1], b"12345678"),
        hostile_array("f4,f4", [1], b"12345678"),
        hostile_array("<f16", [1], b"0" * 16),
        hostile_array("<f3", [1], b"123"),
        hostile_array("<M8[parsec]", [1], b"12345678"),
        hostile_array("<M8[xy]", [1], b"12345678"),
        hostile_array("", [1], b""),
        hostile_array("<f4", [2], b"1234"),
        hostile_array("<f4", [-1, -1], b"1234"),
        hostile_array("<f4", [2**62, 2**62, 0], b""),
        hostile_array("<f4", [1] * 70, b"1234"),
        hostile_array("<U0", [2**40], b""),
        hostile_array("<U9999999999", [0], b""),
        hostile_array("|b1", [1], b"\x02"),
        hostile_array("<U1", [1], b"\xff\xff\xff\xff"),
        hostile_scalar("<f8", b"123"),
        hostile_scalar("<f8", b"12345678", [1]),
        hostile_scalar("<U1", b"\xff\xff\xff\xff"),
        hostile_scalar("|b1", b"\x07"),
        content_pb2.Value(pickled=b"x"),
        content_pb2.Value(container_type="set"),
        content_pb2.Value(container_type=""),
        content_pb2.Value(container_type="os.system"),
    ],
)
def test_decode_when_message_is_hostile_then_raises_the_peers_error(message: content_pb2.Value) -> None:
    with pytest.raises(RemoteProtocolError):
        decode_value(message)
