"""What may be assigned to ragged leaves."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict

from tdserve.base.errors import NotSupportedError
from tdserve.client.content.ragged_values import describe_value, split_entries, split_tensors
from tdserve.structure.trees.nodes import Form, Ragged
from tests.ragged import jagged, strided

TOKENS = Ragged(Form.JAGGED, "int64", (-1,))
MATRIX = Ragged(Form.STACK, "float32", (-1, 2))


@pytest.mark.parametrize(
    ("value", "lengths"),
    [
        (jagged([3, 1]), [3, 1]),
        ([torch.arange(2), torch.arange(0)], [2, 0]),
        ([torch.arange(2), [1, 2, 3]], [2, 3]),
        (torch.zeros(2, 4, dtype=torch.int64), [4, 4]),
        (np.zeros((2, 4), np.int64), [4, 4]),
        (torch.arange(3), [3, 3]),
        ([1, 2, 3], [3, 3]),
    ],
)
def test_tensors_for_when_value_fits_then_elements(value: Any, lengths: list[int]) -> None:
    assert [len(element) for element in split_tensors(value, (2,), TOKENS)] == lengths


@pytest.mark.parametrize(
    "value",
    [
        jagged([3, 1, 2]),
        jagged([3, 1], (), torch.float32),
        jagged([3, 1], (2,)),
        strided((3, 2), (1, 2)),
        torch.zeros(2, 4),
        torch.zeros(3, 4, dtype=torch.int64),
        np.zeros((2, 4), np.float32),
        [torch.arange(2)],
        [torch.arange(2), torch.zeros(2)],
        "text",
        None,
        TensorDict({}),
        torch.tensor(1),
    ],
)
def test_tensors_for_when_value_does_not_fit_then_none(value: Any) -> None:
    assert split_tensors(value, (2,), TOKENS) is None


@pytest.mark.parametrize("listed", [False, True])
def test_tensors_for_when_a_tensor_has_no_memory_then_refused_by_key(listed: bool) -> None:
    blank = torch.zeros(2, device="meta", dtype=torch.int64)
    with pytest.raises(NotSupportedError, match="a meta tensor at key 'a' of store 'store'"):
        split_tensors([torch.arange(2), blank] if listed else blank, (2,), TOKENS, path=("a",), store="store")


def test_tensors_for_when_a_size_is_fixed_then_it_must_be_that() -> None:
    assert split_tensors(torch.zeros(5, 2), (), MATRIX) is not None
    assert split_tensors(torch.zeros(5, 3), (), MATRIX) is None


def test_entries_for_when_leaf_describes_itself_then_any_entry() -> None:
    assert split_entries(["a", "b"], ()).tolist() == ["a", "b"]
    assert split_entries("a", ()).data == "a"
    tensor = jagged([1, 2])
    assert split_entries(tensor, ()) is tensor
    assert [found.tolist() for found in split_entries([["a"], ["b", "c"]], (2,))] == [["a"], ["b", "c"]]
    stack = NonTensorStack(NonTensorStack("a"), NonTensorStack("b"))
    assert [found.tolist() for found in split_entries(stack, (2,))] == [["a"], ["b"]]


@pytest.mark.parametrize("value", ["a", [["a"]], NonTensorStack("a", "b", "c"), torch.zeros(2)])
def test_entries_for_when_rows_are_too_few_or_many_then_none(value: Any) -> None:
    assert split_entries(value, (2,)) is None


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (jagged([3, 1]), "nested int64 of 2 components [[3], [1]]"),
        (torch.zeros(2, 3), "float32[2, 3]"),
        ([1, 2], "list of 2"),
        (NonTensorData("x"), "NonTensorData"),
    ],
)
def test_describe_value_when_it_did_not_fit_then_has_its_shape(value: Any, text: str) -> None:
    assert describe_value(value) == text
