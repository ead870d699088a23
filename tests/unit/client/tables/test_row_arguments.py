from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from tdserve.base.errors import InvalidRequestError
from tdserve.client.tables.row_arguments import to_priorities, to_row_numbers


@pytest.mark.parametrize(
    ("given", "numbers"),
    [
        (TensorDict({"index": torch.tensor([3, 1])}, [2]), [3, 1]),
        (torch.tensor([5, 6], dtype=torch.int32), [5, 6]),
        (np.array([[1, 2], [3, 4]], np.uint8), [1, 2, 3, 4]),
        ([7], [7]),
        ((2, 2), [2, 2]),
        (4, [4]),
        (np.int64(6), [6]),
        ([], []),
        (torch.empty(0), []),
    ],
)
def test_row_numbers_when_given_somehow_then_int64(given: Any, numbers: list[int]) -> None:
    found = to_row_numbers(given)
    assert found.dtype == np.int64
    assert found.flags.c_contiguous
    assert found.tolist() == numbers


@pytest.mark.parametrize("given", [[True, False], torch.ones(3), [1.0], "1", None, TensorDict({}, [2])])
def test_row_numbers_when_they_are_none_then_error(given: Any) -> None:
    with pytest.raises(InvalidRequestError) as raised:
        to_row_numbers(given)
    assert raised.value.argument == "rows"


@pytest.mark.parametrize(
    ("given", "priorities"),
    [
        (0.5, [0.5]),
        (3, [3.0]),
        ([1, 2.5], [1.0, 2.5]),
        (torch.tensor([[0.0], [4.0]]), [0.0, 4.0]),
        (np.zeros(2), [0, 0]),
    ],
)
def test_as_priorities_when_given_somehow_then_float64(given: Any, priorities: list[float]) -> None:
    found = to_priorities(given, 2)
    assert found.dtype == np.float64
    assert found.tolist() == priorities


@pytest.mark.parametrize(
    "given",
    [[1.0], [1.0, 2.0, 3.0], [1.0, -0.1], [float("nan"), 1.0], float("inf"), -1, "much", None, [[1.0], [2.0, 3.0]]],
)
def test_as_priorities_when_one_is_none_then_error(given: Any) -> None:
    with pytest.raises(InvalidRequestError) as raised:
        to_priorities(given, 2)
    assert raised.value.argument == "priority"
