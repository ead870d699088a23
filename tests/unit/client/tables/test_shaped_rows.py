"""Rows in the shape of their numbers: dense ones, stacks, and those that cannot have several dimensions."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tensordict import LazyStackedTensorDict, TensorDict, lazy_stack

from tdserve.base.errors import InvalidRequestError
from tdserve.client.content.padding import pad_built
from tdserve.client.tables.shaped_rows import shape_rows
from tdserve.structure.captures.capture import capture


def shape(rows: Any, shape: tuple[int, ...] | None, pad: Any = None, *, is_array: bool = False) -> Any:
    padded = pad_built(rows, pad, capture(rows).spec)
    return shape_rows(padded, shape, store="t", is_array=is_array)


def make_stack(*sizes: int) -> Any:
    return lazy_stack([TensorDict({"x": torch.arange(size)}) for size in sizes])


def test_shape_when_rows_are_one_or_in_one_dimension_then_as_they_are() -> None:
    rows = TensorDict({"x": torch.arange(4)}, [4])
    assert shape(rows, (4,)) is rows
    assert shape(rows, None) is rows
    assert int(shape(rows, ())["x"]) == 0


def test_shape_when_rows_of_a_stack_become_arrays_then_those_that_are_alike_are_dense() -> None:
    found = shape(make_stack(2, 2, 2, 2), (2, 2), is_array=True)
    assert (type(found), found["x"].shape) == (TensorDict, (2, 2, 2))
    assert isinstance(shape(make_stack(1, 2, 3, 4), (2, 2)), LazyStackedTensorDict)
    with pytest.raises(InvalidRequestError, match=r"table 't', whose rows differ.*pad="):
        shape(make_stack(1, 2, 3, 4), (2, 2), is_array=True)
    assert shape(make_stack(1, 2, 3, 4), (2, 2), -1, is_array=True)["x"].shape == (2, 2, 4)


def test_shape_when_a_nested_tensor_lies_deep_then_its_key_is_named() -> None:
    jagged = torch.nested.nested_tensor([torch.arange(2), torch.arange(3)], layout=torch.jagged)
    rows = TensorDict({"n": TensorDict({"x": jagged}, [2])}, [2])
    with pytest.raises(InvalidRequestError, match=r"3 dimensions.*\('n', 'x'\)"):
        shape(rows, (1, 2, 1))
    assert shape(rows, (1, 2, 1), {("n", "x"): 5})["n", "x"].tolist() == [[[[0, 1, 5]], [[0, 1, 2]]]]
