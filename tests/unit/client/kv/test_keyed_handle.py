"""The arguments of a keyed store's handle; what its calls do is in ``tests/conformance/keyed_suite.py``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

import tdserve
from tdserve.base.errors import InvalidRequestError

pytestmark = pytest.mark.integration


@pytest.fixture
def kv(client: tdserve.Client, name: str) -> Iterator[Any]:
    """An empty keyed store."""
    yield client.create_kv(name)
    client.delete(name)


@pytest.mark.parametrize(
    ("keys", "values", "if_version"),
    [
        (5, 1, None),
        (["a", 5], [1, 2], None),
        ("a", 1, -1),
        ("a", 1, [1, 2]),
        (["a", "b"], [1, 2], [1]),
        (["a", "a"], [1, 2], 0),
        ("a", 1, "1"),
    ],
)
def test_put_when_an_argument_is_wrong_then_refused(kv: Any, keys: Any, values: Any, if_version: Any) -> None:
    with pytest.raises(InvalidRequestError):
        kv.put(keys, values, if_version=if_version)
    assert len(kv) == 0


def test_calls_when_without_keys_then_nothing_happens(kv: Any) -> None:
    assert kv.put([], []) == []
    assert kv.put([], [], return_early=True).result(0) == []
    assert kv.get([]) == []
    assert kv.pop([]) == []
    assert kv.delete([]) == 0
    assert kv.versions([]) == []


def test_repr_when_shown_then_names_the_store(kv: Any) -> None:
    assert kv.name in repr(kv)
