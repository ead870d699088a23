from __future__ import annotations

import enum
from collections import OrderedDict, namedtuple
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tdserve.errors import NotSupportedError, RemoteProtocolError
from tdserve.v1 import content_pb2
from tdserve.values import check_value, decode_bytes, decode_value, encode_bytes, encode_value
from tests.unit.spec.strategies import same_value, values

Pair = namedtuple("Pair", "a b")  # noqa: PYI024 - the kind without annotations is the subclass under test
Colour = enum.IntEnum("Colour", "RED")


@settings(max_examples=300, deadline=None)
@given(values)
def test_value_when_sent_then_comes_back_equal_in_type_and_content(value: Any) -> None:
    assert same_value(decode_bytes(encode_bytes(value)), value)


@pytest.mark.parametrize(
    "value",
    [
        None,
        False,
        2**63 - 1,
        -(2**63),
        2**63,
        -(2**63) - 1,
        255 << 64,
        -(2**1000),
        float("nan"),
        float("-inf"),
        -0.0,
        "",
        "\ud800x",
        "\x00",
        b"\xff",
        [],
        (),
        {},
        {1: "int", "1": "str", None: 0, (1, "a"): [], b"k": {}, True + 1: ()},
        np.array("x\x00y"),
        np.str_("ends with \x00"),
        np.bytes_(b"ends with \x00"),
        np.str_(""),
        np.float16("nan"),
        np.datetime64("NaT"),
        np.timedelta64(5, ("s", 25)),
        np.zeros((3, 0, 2), ">i2"),
        np.asfortranarray(np.arange(6).reshape(2, 3)),
        np.arange(10)[::-2],
    ],
)
def test_value_when_at_an_edge_then_comes_back_equal(value: Any) -> None:
    assert same_value(decode_bytes(encode_bytes(value)), value)


def test_array_when_decoded_then_is_writable() -> None:
    array = decode_bytes(encode_bytes(np.zeros(2)))
    array[0] = 1
    assert array.tolist() == [1, 0]


class Text(str):
    __slots__ = ()


REFUSED = [
    {1},
    1j,
    object(),
    Fraction(1, 3),
    range(3),
    bytearray(b"x"),
    Text("x"),
    Pair(1, 2),
    Colour(1),
    OrderedDict(a=1),
    np.ma.masked_array([1]),
    np.array([object()]),
    np.zeros(2, [("a", "i4")]),
    np.void(b"xx"),
    np.longdouble(1),
    np.zeros(1, np.clongdouble),
    np.ndarray((3,), "U0", buffer=b""),
]


@pytest.mark.parametrize("value", REFUSED, ids=lambda value: type(value).__name__)
def test_value_when_of_another_type_then_is_refused_with_key_and_type_wherever_it_lies(value: Any) -> None:
    for nested in (value, [value], (1, {"k": value})):
        for ask in (check_value, encode_value, encode_bytes):
            with pytest.raises(NotSupportedError, match="'my key'"):
                ask(nested, key="my key")


def test_dict_when_a_key_is_of_another_type_then_is_refused() -> None:
    with pytest.raises(NotSupportedError, match="Colour"):
        check_value({Colour(1): 1})


@pytest.mark.parametrize(("wrap", "depth"), [(lambda v: [v], 44), (lambda v: (v,), 44), (lambda v: {"k": v}, 29)])
def test_containers_when_nested_to_the_limit_then_travel_and_beyond_it_are_refused(wrap: Any, depth: int) -> None:
    value: Any = 1
    for _ in range(depth):
        value = wrap(value)
    assert decode_bytes(encode_bytes(value)) == value
    too_deep = wrap(wrap(value))
    with pytest.raises(NotSupportedError, match="nested too deep"):
        encode_value(too_deep)


def test_list_when_it_contains_itself_then_is_refused() -> None:
    loop: list[Any] = []
    loop.append(loop)
    with pytest.raises(NotSupportedError, match="nested too deep"):
        check_value(loop)


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
    ],
)
def test_decode_when_message_is_hostile_then_raises_the_peers_error(message: content_pb2.Value) -> None:
    with pytest.raises(RemoteProtocolError):
        decode_value(message)


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_decode_when_bytes_are_damaged_then_raises_only_the_peers_error(data: st.DataObject) -> None:
    wire = bytearray(encode_bytes(data.draw(values)))
    for _ in range(data.draw(st.integers(0, 3))):
        wire[data.draw(st.integers(0, len(wire) - 1))] = data.draw(st.integers(0, 255))
    try:
        decode_bytes(bytes(wire))
    except RemoteProtocolError:
        return


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=40))
def test_decode_when_bytes_are_random_then_raises_only_the_peers_error(wire: bytes) -> None:
    try:
        decode_bytes(wire)
    except RemoteProtocolError:
        return
