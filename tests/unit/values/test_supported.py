from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest

from tdserve.base.errors import NotSupportedError
from tdserve.values.supported import CONTAINER_TYPES, check_values
from tdserve.values.value_codec import decode_value, encode_many, encode_value


@pytest.mark.parametrize("value", [*CONTAINER_TYPES.values(), [dict, (list,)], {"k": tuple}])
def test_value_when_it_is_the_type_of_a_container_then_comes_back_as_it(value: Any) -> None:
    check_values([value])
    assert decode_value(encode_value(value)) == value


@pytest.mark.parametrize(
    "value", [{object()}, [bytearray()], int, set, type, {"k": (np.array([object()]),)}, memoryview(b"x")]
)
def test_value_when_a_type_does_not_travel_then_is_refused(value: Any) -> None:
    for ask in (lambda: check_values([None, value], key="my key"), lambda: encode_value(value, key="my key")):
        with pytest.raises(NotSupportedError, match="'my key'"):
            ask()


class Text(str):
    """A string of a type that does not travel."""


@pytest.mark.parametrize("key", [Text("k"), np.longdouble(1), np.clongdouble(1)])
def test_key_when_it_equals_the_key_of_another_dict_but_its_type_does_not_travel_then_is_refused(key: Any) -> None:
    dicts = [{"k": 0, 1: number} for number in range(40)]
    assert [decode_value(record) for record in encode_many(dicts)] == dicts
    with pytest.raises(NotSupportedError, match=r"at key 'my key'"):
        encode_many([*dicts, {key: 0}], key="my key")


def test_keys_when_some_are_containers_then_they_are_looked_into() -> None:
    dicts: list[Any] = [{(number % 2, ("k",)): number} for number in range(40)]
    check_values(dicts)
    deep: Any = ()
    for _ in range(100):
        deep = (deep,)
    for wrong in ({range(1): 0}, {("k", range(1)): 0}, {deep: 0}):
        with pytest.raises(NotSupportedError, match="'my key'"):
            check_values([*dicts, wrong], key="my key")


def test_texts_when_one_of_many_has_half_a_surrogate_pair_then_all_come_back() -> None:
    texts = ["plain", "caf\u00e9", "\ud800", "\U0001f600"]
    assert [decode_value(record) for record in encode_many([[text, {text: text}] for text in texts])] == [
        [text, {text: text}] for text in texts
    ]


@pytest.mark.slow
@pytest.mark.parametrize("times", [2, 999, 10_000])
def test_list_when_it_contains_itself_many_times_then_is_refused_soon(times: int) -> None:
    loop: list[Any] = []
    loop += [loop] * times
    began = time.monotonic()
    with pytest.raises(NotSupportedError, match="nested too deep"):
        check_values([loop])
    assert time.monotonic() - began < 20
