from __future__ import annotations

from typing import Any

import pytest
import torch
from tensordict import TensorDict

from tdserve.client.fitting import fitted
from tdserve.errors import SpecMismatchError
from tdserve.spec.capture import capture

CHOSEN = capture(TensorDict({"a": torch.zeros(3, 2), "n": {"c": torch.zeros(3, dtype=torch.int64)}}, [3])).spec


@pytest.mark.parametrize(
    "value",
    [
        TensorDict({"a": torch.ones(3, 2), "n": {"c": torch.ones(3, dtype=torch.int64)}}, [3]),
        TensorDict({"a": torch.ones(2), "n": {"c": torch.tensor(1)}}, []),
        {"a": torch.ones(3, 2), "n": {"c": torch.ones(3, dtype=torch.int64)}},
    ],
)
def test_fitted_when_everything_is_given_then_whole_and_no_keys(value: Any) -> None:
    captured, keys = fitted(value, CHOSEN, store="x")
    assert keys == []
    assert captured.tensors[("a",)].tolist() == [[1.0, 1.0]] * 3
    assert captured.tensors[("n", "c")].tolist() == [1, 1, 1]


def test_fitted_when_a_part_is_given_then_its_keys() -> None:
    captured, keys = fitted({"n": {"c": torch.tensor([1, 2, 3])}}, CHOSEN, store="x")
    assert keys == [("n", "c")]
    assert list(captured.tensors) == [("n", "c")]
    with pytest.raises(SpecMismatchError) as raised:
        fitted({"n": {"c": torch.tensor([1, 2, 3])}}, CHOSEN, store="x", is_whole=True)
    assert raised.value.key == "a"


def test_fitted_when_one_leaf_is_meant_then_broadcast_as_an_assignment_would() -> None:
    captured, _ = fitted(2.5, CHOSEN.select([("a",)]), at=("a",), store="x")
    assert captured.tensors[("a",)].tolist() == [[2.5, 2.5]] * 3


@pytest.mark.parametrize(
    ("value", "key"),
    [
        ({"a": torch.ones(4, 2)}, "a"),
        ({"a": torch.ones(3, 2, dtype=torch.float64)}, "a"),
        ({"z": torch.ones(3)}, "z"),
        ({"a": "text"}, "a"),
    ],
)
def test_fitted_when_it_does_not_fit_then_error_names_the_key(value: Any, key: str) -> None:
    with pytest.raises(SpecMismatchError) as raised:
        fitted(value, CHOSEN, store="x")
    assert (raised.value.store, raised.value.key) == ("x", key)
