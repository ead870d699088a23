from __future__ import annotations

from typing import Any

import pytest

from tdserve.base.errors import NotSupportedError
from tdserve.values.pickled import dump, load


class Broken:
    """Raises an error of its own when it is pickled."""

    def __reduce__(self) -> Any:
        raise ZeroDivisionError("no")


def test_object_when_pickled_then_comes_back_equal() -> None:
    assert load(dump({1, 2})) == {1, 2}


@pytest.mark.parametrize("value", [lambda: 0, Broken(), (each for each in (1,))])
def test_object_when_it_cannot_be_pickled_then_key_is_named(value: Any) -> None:
    with pytest.raises(NotSupportedError, match="'my key'"):
        dump(value, key="my key")


@pytest.mark.parametrize("content", [b"", b"abc", b"cno_such_module\nName\n.", dump({1})[:-3]])
def test_pickle_when_it_cannot_be_read_then_key_is_named(content: bytes) -> None:
    with pytest.raises(NotSupportedError, match="'my key'"):
        load(content, key="my key")
