from __future__ import annotations

import datetime as dt
import enum
import struct
import tracemalloc
from collections import OrderedDict, namedtuple
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction
from typing import Any
from zoneinfo import ZoneInfo

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from tdserve.base.errors import NotSupportedError, RemoteProtocolError
from tdserve.values.extensions import TUPLE
from tdserve.values.supported import check_values
from tdserve.values.value_codec import NONE, PICKLED, decode_many, decode_value, encode_many, encode_value, is_same
from tdserve.values.value_columns import JoinedValues, measure_sizes
from tests.sameness import same_value
from tests.tensordict_strategies import values

NOT_PICKLED = r"'my key'.*allow_pickle=True"

Pair = namedtuple("Pair", "a b")  # noqa: PYI024 - the kind without annotations is the subclass under test
Colour = enum.IntEnum("Colour", "RED")


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(values)
def test_value_when_sent_then_comes_back_equal_in_type_and_content(value: Any) -> None:
    assert same_value(decode_value(encode_value(value)), value)


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
        complex(-0.0, float("nan")),
        {1, "a", None, (1, frozenset({2}))},
        frozenset(),
        {frozenset({1}): [{2}, set()]},
        dt.date.min,
        dt.timedelta.max,
        dt.timedelta(microseconds=-1),
        dt.time.max,
        dt.datetime(2026, 10, 25, 2, 30, fold=1),  # noqa: DTZ001 - one without a timezone
        dt.datetime(2026, 10, 25, 2, 30, 0, 1, tzinfo=dt.timezone.utc),
        dt.time(1, 2, fold=1, tzinfo=dt.timezone(dt.timedelta(hours=-1, seconds=3, microseconds=2))),
    ],
)
def test_value_when_at_an_edge_then_comes_back_equal(value: Any) -> None:
    assert same_value(decode_value(encode_value(value)), value)


def test_array_when_decoded_then_is_writable() -> None:
    array = decode_value(encode_value(np.zeros(2)))
    array[0] = 1
    assert array.tolist() == [1, 0]


class Text(str):
    __slots__ = ()


REFUSED = [
    memoryview(b"x"),
    object(),
    {object()},
    dt.datetime(2026, 1, 2, tzinfo=dt.timezone(dt.timedelta(hours=1), "CET")),
    dt.time(1, tzinfo=ZoneInfo("UTC")),
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
        with pytest.raises(NotSupportedError, match=NOT_PICKLED):
            check_values([1, nested], key="my key")
        with pytest.raises(NotSupportedError, match=NOT_PICKLED):
            encode_value(nested, key="my key")


def test_dict_when_a_key_is_of_another_type_then_is_refused() -> None:
    with pytest.raises(NotSupportedError, match="Colour"):
        check_values([{Colour(1): 1}])


@pytest.mark.parametrize(
    ("wrap", "depth"),
    [(lambda v: [v], 64), (lambda v: (v,), 64), (lambda v: {"k": v}, 64), (lambda v: frozenset({v}), 64)],
)
def test_containers_when_nested_to_the_limit_then_travel_and_beyond_it_are_refused(wrap: Any, depth: int) -> None:
    value: Any = 1
    for _ in range(depth):
        value = wrap(value)
    assert decode_value(encode_value(value)) == value
    too_deep = wrap(value)
    with pytest.raises(NotSupportedError, match="nested too deep"):
        encode_value(too_deep)


def test_list_when_it_contains_itself_then_is_refused() -> None:
    loop: list[Any] = []
    loop.append(loop)
    with pytest.raises(NotSupportedError, match="nested too deep"):
        check_values([loop])


@pytest.mark.slow
@settings(max_examples=100, deadline=None)
@given(st.lists(values, max_size=4))
def test_many_when_sent_then_are_what_each_is(several: list[Any]) -> None:
    blobs = encode_many(several)
    assert blobs == [encode_value(value) for value in several]
    assert same_value(decode_many(blobs), several)


def test_many_when_one_does_not_travel_then_key_is_named() -> None:
    with pytest.raises(NotSupportedError, match="'my key'"):
        encode_many(["x", Fraction(1)], key="my key")
    with pytest.raises(RemoteProtocolError):
        decode_many([encode_value("x"), b""])


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(st.data())
def test_decode_when_bytes_are_damaged_then_raises_only_the_peers_error(data: st.DataObject) -> None:
    wire = bytearray(encode_value(data.draw(values)))
    for _ in range(data.draw(st.integers(0, 3))):
        place = data.draw(st.integers(0, len(wire) - 1))
        if data.draw(st.booleans()):
            wire[place] = data.draw(st.integers(0, 255))
        else:
            wire[place:place] = data.draw(st.binary(max_size=2))
    check_hostile(bytes(wire[: data.draw(st.integers(0, len(wire)))]))


@pytest.mark.slow
@settings(max_examples=500, deadline=None)
@given(st.binary(max_size=60))
def test_decode_when_bytes_are_random_then_raises_only_the_peers_error(wire: bytes) -> None:
    check_hostile(wire)


def check_hostile(wire: bytes) -> None:
    """Checks that bytes are refused with our errors, or are a value that can be encoded again."""
    try:
        value = decode_value(wire)
    except RemoteProtocolError:
        return
    except NotSupportedError:
        assert wire[0] == PICKLED
        return
    assert same_value(decode_value(encode_value(value)), value)
    with pytest.raises(RemoteProtocolError):
        decode_many([wire, wire + b"\xc0"])


MARK = bytes([0xC7, 0, TUPLE])
"""First bytes of an encoded tuple's list."""

TIMESTAMP = b"\xd6\xff\x00\x00\x00\x01"


@pytest.mark.parametrize(
    "wire",
    [
        b"",
        b"\xc0\xc0",
        b"\xa3ab",
        b"\xa1\xff",  # no UTF-8
        b"\x91\xc1",
        b"\x91\xc1\x80\x05N.",  # a pickle inside of another value
        b"\x82\x01\xc0\x01\xc0",  # a key twice
        b"\x82\x01\xc0\xc3\xc0",  # True is 1
        b"\x81\x90\xc0",  # a list as key
        b"\x81\x80\xc0",
        b"\x81\x92" + MARK + b"\x90\xc0",  # a tuple of a list as key
        MARK,
        b"\x92\x01" + MARK,
        b"\x92" + MARK + MARK,
        b"\x81" + MARK + b"\xc0",
        b"\x81\xc0" + MARK,
        b"\x91\xd4\x02\x00",  # a mark with content
        b"\xd4\x00\x00",
        b"\xd4\x63\x00",
        TIMESTAMP,
        b"\x81" + TIMESTAMP + b"\xc0",
        b"\xd6\xff\xff\xff",
        b"\xc7\x03\xff\x00\x00\x00",
        b"\xdd\xff\xff\xff\xff",
        b"\xdf\xff\xff\xff\xff",
        b"\xc6\xff\xff\xff\xff",
        b"\xdb\xff\xff\xff\xff",
        b"\xc9\xff\xff\xff\xff\x03",
        b"\x91" * 65 + b"\xc0",
        b"\x91" * 5000 + b"\xc0",
        b"\x81" * 5000 + b"\xc0" * 5001,
        (b"\x81\x92" + MARK) * 600 + b"\xc0" * 601,  # tuples in keys of keys
        (b"\x92" + MARK) * 65 + b"\xc0",
        b"\x82" + ((b"\x92" + MARK) * 1000 + b"\xc0\xc0") * 2,  # a key twice that Python cannot compare
        b"\x92\xc6\x00\x30\x00\x00" + bytes(0x300000) + MARK,  # of more bytes than are gone through first
        b"\x93\xc6\x00\x30\x00\x00" + bytes(0x300000) + b"\xc0",
    ],
)
def test_decode_when_record_is_hostile_then_raises_the_peers_error_also_among_others(wire: bytes) -> None:
    with pytest.raises(RemoteProtocolError):
        decode_value(wire)
    with pytest.raises(RemoteProtocolError):
        decode_many([encode_value("x"), wire])


def test_decode_when_a_record_ends_inside_of_the_next_then_is_refused() -> None:
    first, second = encode_value("one"), encode_value("two")
    whole = first + second
    for cut in (0, 1, len(first) - 1, len(first) + 1, len(whole)):
        with pytest.raises(RemoteProtocolError):
            decode_many([whole[:cut], whole[cut:]])


@pytest.mark.parametrize("length", [100, 10_000, 100_000, 3_000_000])
def test_decode_when_lists_begin_in_lists_then_takes_no_more_memory_than_the_bytes_justify(length: int) -> None:
    wire = (b"\xdd" + length.to_bytes(4, "big")) * 1000 + bytes(length)
    tracemalloc.start()
    try:
        with pytest.raises(RemoteProtocolError):
            decode_value(wire)
        with pytest.raises(RemoteProtocolError):
            decode_many([b"\xc0", wire])
        assert tracemalloc.get_traced_memory()[1] < 64 * len(wire) + 1_000_000
    finally:
        tracemalloc.stop()


def test_many_when_large_or_in_one_buffer_then_are_what_each_is() -> None:
    several = [np.zeros(300_000), "x", {"k": bytes(100)}]
    blobs = encode_many(several)
    joined = JoinedValues(b"before" + b"".join(blobs), measure_sizes(blobs), begins=6)
    assert same_value(decode_many(blobs), several)
    assert same_value(decode_many(joined), several)
    few = blobs[1:]
    assert same_value(decode_many(few), several[1:])
    assert same_value(decode_many(JoinedValues(b"".join(few), measure_sizes(few))), several[1:])
    begins = np.array([len(few[1]) + 3, 0], np.int64)
    assert same_value(
        decode_many(JoinedValues(few[1] + b"..." + few[0], measure_sizes(few), begins=begins)), several[1:]
    )
    assert decode_many([]) == []
    assert decode_many(JoinedValues(b"", measure_sizes([]))) == []


def test_many_when_some_are_pickled_then_all_come_back() -> None:
    several = ["x", {1}, [1.5]]
    assert decode_many(encode_many(several, allow_pickle=True), allow_pickle=True) == several


def test_record_of_none_when_written_then_is_the_one_that_others_compare_with() -> None:
    assert encode_value(None) == NONE


@pytest.mark.parametrize("bits", [0x7FF8DEAD0000BEEF, 0xFFF8000000000001, 0x7FF0000000000001])
def test_float_when_not_a_number_then_keeps_its_bits(bits: int) -> None:
    (value,) = struct.unpack("<d", struct.pack("<Q", bits))
    assert struct.pack("<d", decode_value(encode_value(value))) == struct.pack("<Q", bits)


def test_values_when_encoded_by_many_threads_then_do_not_mix() -> None:
    several = [[("t", number), {"k": np.full(50, number)}, 2**70 + number] for number in range(50)]
    with ThreadPoolExecutor(8) as pool:
        for blobs in pool.map(lambda _: encode_many(several), range(40)):
            assert same_value(decode_many(blobs), several)


@pytest.mark.parametrize(
    "value", [{Text("x")}, torch.float32, [1, (Fraction(1, 3), {"k": Pair(1, 2)})], Text("x"), Fraction(1)]
)
def test_object_when_both_ends_allow_pickle_then_comes_back_equal(value: Any) -> None:
    (data,) = encode_many([value], allow_pickle=True)
    assert data[0] == PICKLED
    (found,) = decode_many([data], allow_pickle=True)
    assert found == value
    assert type(found) is type(value)


def test_object_when_reader_does_not_allow_pickle_then_is_refused_with_key_and_remedy() -> None:
    blobs = encode_many(["x", Fraction(1)], allow_pickle=True)
    with pytest.raises(NotSupportedError, match=NOT_PICKLED):
        decode_many(blobs, key="my key")
    with pytest.raises(NotSupportedError, match=NOT_PICKLED):
        encode_value(Fraction(1), key="my key")


def test_value_when_pickle_is_allowed_but_not_needed_then_is_not_pickled() -> None:
    several = [1, "x", {"k": [np.ones(2)]}]
    assert encode_many(several, allow_pickle=True) == encode_many(several)


def test_list_when_it_contains_itself_and_pickle_is_allowed_then_comes_back_so() -> None:
    loop: list[Any] = []
    loop.append(loop)
    found = decode_value(encode_value(loop, allow_pickle=True), allow_pickle=True)
    assert found[0] is found


@pytest.mark.parametrize("content", [b"", b"\xc1", b"\xc1ab", b"\xc1\x80\x05", b"\xc0\xc1"])
def test_pickled_when_bytes_are_damaged_then_raises_only_our_errors(content: bytes) -> None:
    with pytest.raises((RemoteProtocolError, NotSupportedError)):
        decode_value(content, allow_pickle=True)


@pytest.mark.parametrize(
    ("left", "right", "same"),
    [
        (1, 1, True),
        (1, True, False),
        ([1.0], [1], False),
        ({1}, {1}, True),
        ({1}, {True}, False),
        (range(1), range(1), False),
        (0.0, -0.0, False),
        (float("nan"), float("nan"), True),
        ((1,), [1], False),
    ],
)
def test_same_when_asked_then_type_and_content_count(left: Any, right: Any, same: bool) -> None:
    assert is_same(left, right) is same
