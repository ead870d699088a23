from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tdserve.errors import InvalidRequestError
from tdserve.replay.arguments import check_integer, finite_number


@pytest.mark.parametrize("value", [2, True, 3.0, "3", None, [], np.float64(3)])
def test_check_integer_when_it_is_none_of_at_least_the_minimum_then_refused(value: Any) -> None:
    check_integer("max_size", 3, 3)
    with pytest.raises(InvalidRequestError, match="not an integer of at least 3") as caught:
        check_integer("max_size", value, 3)
    assert caught.value.argument == "max_size"


@pytest.mark.parametrize(
    "value", [-1, -1e-300, float("nan"), float("inf"), 10**400, True, "1", None, 1j, np.float32("nan")]
)
def test_finite_number_when_it_is_none_then_refused(value: Any) -> None:
    with pytest.raises(InvalidRequestError, match="not a finite number") as caught:
        finite_number("alpha", value)
    assert caught.value.argument == "alpha"
    assert len(str(caught.value)) < 200


@pytest.mark.parametrize("value", [2, 2.0, np.float32(2), np.int64(2)])
def test_finite_number_when_given_in_other_types_then_the_same_float(value: Any) -> None:
    number = finite_number("alpha", value)
    assert type(number) is float
    assert repr(number) == "2.0"


def test_finite_number_when_it_is_minus_zero_then_zero() -> None:
    assert repr(finite_number("alpha", -0.0)) == "0.0"
