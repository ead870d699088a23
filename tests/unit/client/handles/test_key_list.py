from __future__ import annotations

import operator
from typing import Any

import pytest

from tdserve.client.handles.key_list import KeyList

KEYS = KeyList(["b", ("n", "c"), "a"])


def test_keys_when_compared_then_with_lists_by_order_and_with_sets_by_content() -> None:
    assert KEYS == ["b", ("n", "c"), "a"]
    assert KEYS != ["a", "b", ("n", "c")]
    assert {"a", "b", ("n", "c")} == KEYS
    assert {"a", "b"} != KEYS
    assert {"b": 1, ("n", "c"): 2, "a": 3}.keys() == KEYS


@pytest.mark.parametrize("operation", [operator.and_, operator.or_, operator.xor, operator.sub])
@pytest.mark.parametrize("other", [{"a", "z"}, {"a": 1, "z": 2}.keys(), KeyList(["a", "z"])])
def test_keys_when_combined_with_others_then_as_sets_are(operation: Any, other: Any) -> None:
    assert operation(KEYS, other) == operation(set(KEYS), set(other))
    assert operation(other, KEYS) == operation(set(other), set(KEYS))


def test_keys_when_disjoint_then_isdisjoint() -> None:
    assert KEYS.isdisjoint(["z"])
    assert not KEYS.isdisjoint(["a"])
