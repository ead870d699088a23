"""The hand-written bytes of values against those of the generated message class."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings

from tdserve.v1 import content_pb2
from tdserve.value_encoding import encode, encode_common, pickled
from tdserve.value_messages import encode_value
from tests.unit.spec.strategies import values

LONG_KEYS = {"k" * size: "v" * size for size in (0, 1, 50, 63, 126, 127, 128, 2047, 2048, 20_000)}


@settings(max_examples=300, deadline=None)
@given(values)
@example(LONG_KEYS)
@example([LONG_KEYS, (LONG_KEYS,), 2**63 - 1, -(2**63), 2**63, "\ud800" * 200])
@example({1: 2, True + 1: 3, None: (), b"": {}, 2.5: [None, False]})
def test_bytes_when_written_then_are_those_of_the_message(value: Any) -> None:
    assert encode(value) == encode_value(value).SerializeToString()


def test_many_when_all_are_common_then_are_what_each_is_and_else_none() -> None:
    several = ["x", 1, {"k": [None]}, np.ones(2)]
    assert encode_common(several) == [encode(value) for value in several]
    assert encode_common([]) == []
    assert encode_common(["x", {1}]) is None
    assert encode_common([2**70]) is None


@pytest.mark.parametrize("size", [0, 1, 127, 128, 3000])
def test_pickled_when_written_then_is_the_messages_field(size: int) -> None:
    assert pickled(b"p" * size) == content_pb2.Value(pickled=b"p" * size).SerializeToString()


def test_names_of_dicts_when_more_than_are_kept_then_are_still_written() -> None:
    for number in range(0, 10_000, 1000):
        value = {f"key {number + each}": each for each in range(1000)}
        assert encode(value) == encode_value(value).SerializeToString()
