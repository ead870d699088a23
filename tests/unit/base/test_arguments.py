from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tdserve.base.arguments import to_finite_number, to_key_path
from tdserve.base.errors import InvalidRequestError


@pytest.mark.parametrize(
    "value", [-1, -1e-300, float("nan"), float("inf"), 10**400, True, "1", None, 1j, np.float32("nan")]
)
def test_finite_number_when_it_is_none_then_refused(value: Any) -> None:
    with pytest.raises(InvalidRequestError, match="not a finite number") as caught:
        to_finite_number("alpha", value)
    assert caught.value.argument == "alpha"
    assert len(str(caught.value)) < 200


@pytest.mark.parametrize("value", [2, 2.0, np.float32(2), np.int64(2)])
def test_finite_number_when_given_in_other_types_then_the_same_float(value: Any) -> None:
    number = to_finite_number("alpha", value)
    assert type(number) is float
    assert repr(number) == "2.0"


def test_finite_number_when_it_is_minus_zero_then_zero() -> None:
    assert repr(to_finite_number("alpha", -0.0)) == "0.0"


@pytest.mark.parametrize(("key", "path"), [(None, None), ("a", ("a",)), (("a", "b"), ("a", "b")), (["a"], ("a",))])
def test_key_path_when_given_in_any_form_then_a_tuple(key: Any, path: Any) -> None:
    assert to_key_path("end_key", key) == path


@pytest.mark.parametrize("key", ["", (), ("a", ""), ("a", 1), 1])
def test_key_path_when_it_is_none_then_refused(key: Any) -> None:
    with pytest.raises(InvalidRequestError, match="not a key") as caught:
        to_key_path("end_key", key)
    assert caught.value.argument == "end_key"
