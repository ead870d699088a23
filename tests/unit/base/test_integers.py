from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tdserve.base.errors import InvalidRequestError
from tdserve.base.integers import LARGEST, check_integer, check_version, to_integer


@pytest.mark.parametrize("value", [5, np.int64(5), np.uint8(5)], ids=repr)
def test_value_when_an_integer_of_python_or_numpy_then_that_integer(value: object) -> None:
    found = to_integer(value)
    assert found == 5
    assert type(found) is int


@pytest.mark.parametrize("value", [True, np.True_, 5.0, np.float64(5), "5", None, [5]], ids=repr)
def test_value_when_anything_else_then_none(value: object) -> None:
    assert to_integer(value) is None


@pytest.mark.parametrize("value", [2, True, 3.0, "3", None, [], np.float64(3)])
def test_check_integer_when_it_is_none_of_at_least_the_minimum_then_refused(value: Any) -> None:
    check_integer("max_size", 3, 3)
    with pytest.raises(InvalidRequestError, match="not an integer of at least 3") as caught:
        check_integer("max_size", value, 3)
    assert caught.value.argument == "max_size"


@pytest.mark.parametrize("value", [3, np.int64(3)], ids=repr)
def test_check_integer_when_it_is_one_then_a_plain_integer(value: Any) -> None:
    number = check_integer("max_size", value, 3)
    assert number == 3
    assert type(number) is int


def test_check_integer_when_above_the_maximum_then_refused() -> None:
    assert check_integer("max_size", 4, 3, maximum=4) == 4
    for value, maximum in ((5, 4), (LARGEST + 1, LARGEST)):
        with pytest.raises(InvalidRequestError, match=f"{value} is above {maximum}"):
            check_integer("max_size", value, 3, maximum=maximum)


@pytest.mark.parametrize(
    ("value", "version"), [(7, 7), (np.int64(7), 7), (0, 0), (-5, -1), (10**30, LARGEST), (-(10**30), -1)]
)
def test_check_version_when_an_integer_then_limited_to_what_a_message_can_carry(value: Any, version: int) -> None:
    assert check_version("newer_than", value) == version


@pytest.mark.parametrize("value", ["1", 1.5, True, None], ids=repr)
def test_check_version_when_no_integer_then_refused(value: Any) -> None:
    with pytest.raises(InvalidRequestError, match=r"newer_than: .* is not a version"):
        check_version("newer_than", value)
