"""The hand-written reader of values against the one that goes by the generated message class."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from google.protobuf.message import DecodeError
from hypothesis import example, given, settings, strategies as st

from tdserve.base.errors import RemoteProtocolError, TDServeError
from tdserve.messages.value_columns import JoinedValues, sizes_of
from tdserve.v1 import content_pb2
from tdserve.values.decoding import PICKLED, decode, decode_common, pickled_content
from tdserve.values.encoding import encode, pickled
from tdserve.values.messages import decode_value
from tests.unit.structure.strategies import same_value, values

TEXT = encode("x")


def outcome(ask: Any, data: bytes) -> tuple[type, Any]:
    """What a reader makes of bytes: the class of its error, or its value."""
    try:
        return (type(None), ask(data))
    except TDServeError as error:
        return (type(error), None)


def by_message(data: bytes) -> Any:
    """The value of bytes by way of the generated class."""
    try:
        return decode_value(content_pb2.Value.FromString(data))
    except DecodeError as error:
        raise RemoteProtocolError(expected="a value", received=str(error)) from None


@settings(max_examples=400, deadline=None)
@given(st.data())
def test_bytes_when_damaged_then_both_readers_agree(data: st.DataObject) -> None:
    wire = bytearray(encode(data.draw(values)))
    for _ in range(data.draw(st.integers(0, 3))):
        place = data.draw(st.integers(0, len(wire) - 1))
        if data.draw(st.booleans()):
            wire[place] = data.draw(st.integers(0, 255))
        else:
            wire[place:place] = data.draw(st.binary(max_size=2))
    found, expected = outcome(decode, bytes(wire)), outcome(by_message, bytes(wire))
    assert found[0] is expected[0]
    assert same_value(found[1], expected[1])


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x32",
        b"\x32\x05abc",
        b"\x32\x81\x00a",  # a length that is longer than it need be
        b"\x32\x01a\x32\x01b",  # the last one counts
        b"\x10\x02",
        b"\x08\x00",
        b"\x29abc",
        b"\x18" + b"\xff" * 9 + b"\x01",
        b"\x18" + b"\xff" * 9 + b"\x7f",
        b"\x18" + b"\xff" * 12,
        b"\x32\x01\xff",
        b"\x42\x02\x0a\x00",
        b"\x42\x03\x0a\x7f\x08",
        b"\x42\x04\x0a\x02\x08\x01\x08",
        b"\x42\x00",
        b"\x52\x00",
        b"\x52\x02\x0a\x00",
        b"\x52\x08\x0a\x06\x0a\x02\x08\x01\x12\x00",
        b"\x22\x00",
        b"\x42\x06\x0a\x09\x29abc",
        b"\x42\x04\x0a\x05\x32\x03abc",
        b"\x42\x05\x0a\x05\x32\x03a",
        encode({1: 2, 3: 4}).replace(encode(3), encode(1)),
        encode({"a": 2, "b": 4}).replace(encode("b"), encode("a")),
        b"\x7a\x01a" + TEXT,  # a field of a later version
    ],
)
def test_bytes_when_unusual_then_both_readers_agree(data: bytes) -> None:
    assert outcome(decode, data) == outcome(by_message, data)


def test_bytes_when_nested_without_end_then_are_refused() -> None:
    item = content_pb2.Value(text="x").SerializeToString()
    for _ in range(400):
        items = content_pb2.Value(raw=item).SerializeToString()[1:]  # with its length in front
        item = b"\x42" + content_pb2.Value(raw=b"\x0a" + items).SerializeToString()[1:]
    data = item
    with pytest.raises(RemoteProtocolError):
        decode(data)


def test_many_when_all_are_common_then_are_what_each_is_and_else_none() -> None:
    several = ["x", 1, {"k": [None]}, np.ones(2)]
    blobs = [encode(value) for value in several]
    assert same_value(decode_common(blobs), several)
    assert decode_common([*blobs, pickled(b"p")]) is None
    assert decode_common([b""]) is None


@given(st.lists(values, max_size=5), st.lists(st.binary(max_size=9), min_size=5, max_size=5))
def test_many_when_they_lie_among_other_bytes_of_one_buffer_then_are_what_each_is(
    several: list[Any], between: list[bytes]
) -> None:
    blobs = list(map(encode, several))
    content, begins = b"", []
    for blob, other in zip(blobs, between, strict=False):
        begins.append(len(content + other))
        content += other + blob
    found = decode_common(JoinedValues(content, sizes_of(blobs), begins=np.array(begins, np.int64)))
    assert same_value(found, decode_common(blobs))


@given(st.binary(min_size=1, max_size=40), st.data())
@example(encode("text") + encode("more"), None)
def test_bytes_when_more_follow_then_are_read_as_if_nothing_did(content: bytes, data: st.DataObject | None) -> None:
    size = len(encode("text")) - 1 if data is None else data.draw(st.integers(0, len(content)))
    whole = decode_common([content[:size]])
    assert same_value(decode_common(JoinedValues(content, np.array([size]))), whole)


@pytest.mark.parametrize("size", [0, 1, 127, 128, 3000])
def test_pickled_when_read_then_is_only_content(size: int) -> None:
    data = pickled(b"p" * size)
    assert data[0] == PICKLED
    assert pickled_content(data) == b"p" * size
    with pytest.raises(RemoteProtocolError):
        decode(data)


def test_names_of_dicts_when_more_than_are_kept_then_still_come_back() -> None:
    for number in range(0, 10_000, 1000):
        value = {f"key {number + each}": each for each in range(1000)}
        assert decode(encode(value)) == value
