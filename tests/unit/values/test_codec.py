from __future__ import annotations

import enum
from collections import OrderedDict, namedtuple
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from tdserve.base.errors import NotSupportedError, RemoteProtocolError
from tdserve.values.codec import check_values, decode_bytes, decode_many, encode_bytes, encode_many, is_same
from tdserve.values.decoding import PICKLED
from tests.unit.structure.strategies import same_value, values

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
        with pytest.raises(NotSupportedError, match=r"'my key'.*allow_pickle=True"):
            check_values([1, nested], key="my key")
        with pytest.raises(NotSupportedError, match=r"'my key'.*allow_pickle=True"):
            encode_bytes(nested, key="my key")


def test_dict_when_a_key_is_of_another_type_then_is_refused() -> None:
    with pytest.raises(NotSupportedError, match="Colour"):
        check_values([{Colour(1): 1}])


@pytest.mark.parametrize(("wrap", "depth"), [(lambda v: [v], 44), (lambda v: (v,), 44), (lambda v: {"k": v}, 29)])
def test_containers_when_nested_to_the_limit_then_travel_and_beyond_it_are_refused(wrap: Any, depth: int) -> None:
    value: Any = 1
    for _ in range(depth):
        value = wrap(value)
    assert decode_bytes(encode_bytes(value)) == value
    too_deep = wrap(wrap(value))
    with pytest.raises(NotSupportedError, match="nested too deep"):
        encode_bytes(too_deep)


def test_list_when_it_contains_itself_then_is_refused() -> None:
    loop: list[Any] = []
    loop.append(loop)
    with pytest.raises(NotSupportedError, match="nested too deep"):
        check_values([loop])


@settings(max_examples=100, deadline=None)
@given(st.lists(values, max_size=4))
def test_many_when_sent_then_are_what_each_is(several: list[Any]) -> None:
    blobs = encode_many(several)
    assert blobs == [encode_bytes(value) for value in several]
    assert same_value(decode_many(blobs), several)


def test_many_when_one_does_not_travel_then_key_is_named() -> None:
    with pytest.raises(NotSupportedError, match="'my key'"):
        encode_many(["x", {1}], key="my key")
    with pytest.raises(RemoteProtocolError):
        decode_many([encode_bytes("x"), b""])


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
    except NotSupportedError:
        assert wire[0] == PICKLED


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=40).filter(lambda wire: not wire.startswith(bytes([PICKLED]))))
def test_decode_when_bytes_are_random_then_raises_only_the_peers_error(wire: bytes) -> None:
    try:
        decode_bytes(wire)
    except RemoteProtocolError:
        return


@pytest.mark.parametrize("value", [{1}, torch.float32, [1, (Fraction(1, 3), {"k": Pair(1, 2)})], Text("x"), 1j])
def test_object_when_both_ends_allow_pickle_then_comes_back_equal(value: Any) -> None:
    (data,) = encode_many([value], allow_pickle=True)
    assert data[0] == PICKLED
    (found,) = decode_many([data], allow_pickle=True)
    assert found == value
    assert type(found) is type(value)


def test_object_when_reader_does_not_allow_pickle_then_is_refused_with_key_and_remedy() -> None:
    blobs = encode_many(["x", {1}], allow_pickle=True)
    with pytest.raises(NotSupportedError, match=r"'my key'.*allow_pickle=True"):
        decode_many(blobs, key="my key")
    with pytest.raises(NotSupportedError, match=r"'my key'.*allow_pickle=True"):
        encode_bytes({1}, key="my key")


def test_value_when_pickle_is_allowed_but_not_needed_then_is_not_pickled() -> None:
    several = [1, "x", {"k": [np.ones(2)]}]
    assert encode_many(several, allow_pickle=True) == encode_many(several)


def test_list_when_it_contains_itself_and_pickle_is_allowed_then_comes_back_so() -> None:
    loop: list[Any] = []
    loop.append(loop)
    found = decode_bytes(encode_bytes(loop, allow_pickle=True), allow_pickle=True)
    assert found[0] is found


@pytest.mark.parametrize("content", [b"", b"\x72", b"\x72\x05ab", b"\x72\x02xx\x08\x01"])
def test_pickled_when_bytes_are_damaged_then_raises_only_our_errors(content: bytes) -> None:
    with pytest.raises((RemoteProtocolError, NotSupportedError)):
        decode_bytes(content, allow_pickle=True)


@pytest.mark.parametrize(
    ("left", "right", "same"), [(1, 1, True), (1, True, False), ([1.0], [1], False), ({1}, {1}, False)]
)
def test_same_when_asked_then_type_and_content_count(left: Any, right: Any, same: bool) -> None:
    assert is_same(left, right) is same
