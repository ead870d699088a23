from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest

from tdserve.base.errors import NotSupportedError
from tdserve.values.supported import CONTAINER_TYPES, check_values
from tdserve.values.value_codec import decode_bytes, encode_bytes


@pytest.mark.parametrize("value", [*CONTAINER_TYPES.values(), [dict, (list,)], {"k": tuple}])
def test_value_when_it_is_the_type_of_a_container_then_comes_back_as_it(value: Any) -> None:
    check_values([value])
    assert decode_bytes(encode_bytes(value)) == value


@pytest.mark.parametrize("value", [{1}, [1j], int, set, type, {"k": (np.array([object()]),)}, memoryview(b"x")])
def test_value_when_a_type_does_not_travel_then_is_refused(value: Any) -> None:
    for ask in (lambda: check_values([None, value], key="my key"), lambda: encode_bytes(value, key="my key")):
        with pytest.raises(NotSupportedError, match="'my key'"):
            ask()


@pytest.mark.parametrize("times", [2, 999, 10_000])
def test_list_when_it_contains_itself_many_times_then_is_refused_soon(times: int) -> None:
    loop: list[Any] = []
    loop += [loop] * times
    began = time.monotonic()
    with pytest.raises(NotSupportedError, match="nested too deep"):
        check_values([loop])
    assert time.monotonic() - began < 20
