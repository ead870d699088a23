"""Settings of keyed stores."""

from __future__ import annotations

from typing import Any

import pytest

from tdserve.base.errors import InvalidRequestError
from tdserve.rules.kv.keyed_settings import KeyedSettings


@pytest.mark.parametrize(
    "settings",
    [KeyedSettings(), KeyedSettings("tensor", 10, "lru", 1.5), KeyedSettings("tensordict", max_bytes=1)],
)
def test_json_when_read_back_then_equal(settings: KeyedSettings) -> None:
    assert KeyedSettings.from_json(settings.to_json()) == settings


def test_json_when_all_is_usual_then_empty() -> None:
    assert KeyedSettings().to_json() == "{}"
    assert KeyedSettings.from_json("") == KeyedSettings()


@pytest.mark.parametrize(
    "wrong",
    [
        {"like": "row"},
        {"eviction": "fifo", "max_bytes": 1},
        {"eviction": "lru"},
        {"max_bytes": -1},
        {"max_bytes": 1.5},
        {"ttl_s": -1.0},
        {"ttl_s": 1e12},
        {"ttl_s": True},
        {"ttl_s": float("nan")},
    ],
)
def test_settings_when_invalid_then_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequestError):
        KeyedSettings(**wrong)


@pytest.mark.parametrize("text", ["[", "[]", '{"other": 1}', '{"max_bytes": "x"}'])
def test_from_json_when_it_is_something_else_then_refused(text: str) -> None:
    with pytest.raises(InvalidRequestError):
        KeyedSettings.from_json(text)
