"""The hand-written bytes of values against those of the generated message class."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings, strategies as st

from tdserve.v1 import content_pb2
from tdserve.values.encoding import MIN_TOGETHER, encode, encode_common, pickled
from tdserve.values.messages import MAX_DEPTH, encode_value
from tests.unit.structure.strategies import values

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


ATOMS = st.one_of(
    st.none(), st.booleans(), st.integers(-(2**63), 2**63 - 1), st.floats(), st.text(max_size=300), st.binary()
)


@settings(deadline=None)
@given(st.data())
def test_many_when_dicts_have_the_same_keys_then_are_what_each_is(data: st.DataObject) -> None:
    names = data.draw(st.lists(st.text(max_size=80), max_size=4, unique=True))
    of_a_kind = st.sampled_from([ATOMS, st.text(), st.integers(0, 5000), st.booleans()])
    kinds = {name: data.draw(of_a_kind) for name in names}
    inner = st.fixed_dictionaries(kinds)
    outer = st.fixed_dictionaries({"inner": inner, "k": ATOMS, **kinds})
    several = data.draw(st.lists(outer, min_size=MIN_TOGETHER, max_size=MIN_TOGETHER + 2))
    assert encode_common(several) == [encode_value(value).SerializeToString() for value in several]


@pytest.mark.parametrize("size", [0, 1, 120, 126, 127, 128, 2030, 2047, 2048, 20_000])
def test_many_when_texts_are_of_any_size_then_are_what_each_is(size: int) -> None:
    texts = ["t" * (size + number) for number in range(MIN_TOGETHER)]
    dicts = [{"k" * size: text, "n": {"m": text}} for text in texts]
    for several in (texts, dicts, [text.encode() for text in texts]):
        assert encode_common(several) == [encode_value(value).SerializeToString() for value in several]


@pytest.mark.parametrize(
    "odd",
    [
        {"a": 1, "b": "x"},
        {"b": "x", "a": 2},
        {"a": "\ud800", "b": "\ud800"},
        {"a": None, "b": ["x"]},
        {"a": True, "b": ""},
        {1: 2, "b": ""},
        {},
        "x",
    ],
)
def test_many_when_one_is_unlike_the_others_then_each_is_what_it_is(odd: Any) -> None:
    several = [*({"a": number, "b": "y"} for number in range(MIN_TOGETHER)), odd]
    assert encode_common(several) == [encode_value(value).SerializeToString() for value in several]
    assert encode_common([odd] * MIN_TOGETHER) == [encode_value(odd).SerializeToString()] * MIN_TOGETHER


class _Text(str):
    """No value that travels, though it equals one."""


@pytest.mark.parametrize("odd", [{_Text("a"): 1}, {"a": _Text("x")}, {"a": {1}}, {"a": 2**63}])
def test_many_when_one_cannot_travel_then_none(odd: Any) -> None:
    assert encode_common([*({"a": number} for number in range(MIN_TOGETHER)), odd]) is None


def test_many_when_dicts_are_nested_too_deeply_then_none() -> None:
    deep: Any = 1
    for _ in range(MAX_DEPTH):
        deep = {"a": deep}
    assert encode_common([deep] * MIN_TOGETHER) is None


def test_many_when_of_more_keys_than_are_kept_then_are_still_written() -> None:
    for number in range(0, 1000, 100):
        dicts = [{f"many {number + each}": "v" for each in range(100)}] * MIN_TOGETHER
        assert encode_common(dicts) == [encode_value(value).SerializeToString() for value in dicts]


@pytest.mark.parametrize("size", [0, 1, 127, 128, 3000])
def test_pickled_when_written_then_is_the_messages_field(size: int) -> None:
    assert pickled(b"p" * size) == content_pb2.Value(pickled=b"p" * size).SerializeToString()


def test_names_of_dicts_when_more_than_are_kept_then_are_still_written() -> None:
    for number in range(0, 10_000, 1000):
        value = {f"key {number + each}": each for each in range(1000)}
        assert encode(value) == encode_value(value).SerializeToString()
