"""A choice of rows from what a caller gives for several rows, in each form that callers may use."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from tensordict import NonTensorStack, TensorDict, lazy_stack

from tdserve.client.content.row_choice import choose_rows, count_rows
from tests.ragged import CASES, check_same, jagged, strided, turns

SHAPES = ((3, 1), (2, 4), (1, 1), (5, 2))


def make_batch() -> Any:
    nested = TensorDict({"image": strided(*SHAPES), "tokens": jagged([2, 0, 5, 1])}, [4])
    histories = lazy_stack([turns(size) for size in (1, 3, 2, 1)])
    return TensorDict({"n": nested, "h": histories, "s": NonTensorStack(*"abcd"), "r": torch.rand(4, 2)}, [4])


@pytest.mark.parametrize("where", [torch.tensor([3, 1]), slice(1, None)])
def test_choose_when_a_batch_has_nested_tensors_of_both_layouts_then_whole_rows(where: Any) -> None:
    batch = make_batch()
    found = choose_rows(batch, where)
    numbers = list(range(4))[where] if isinstance(where, slice) else where.tolist()
    assert found.batch_size == (len(numbers),)
    for at, number in enumerate(numbers):
        check_same(batch[number], found[at])
    assert count_rows(batch) == 4


@pytest.mark.parametrize("case", ["jagged", "jagged, with lengths", "jagged, transposed", "strided"])
def test_choose_when_a_tensor_is_nested_then_its_components(case: str) -> None:
    tensor = CASES[case]["t"]
    found = choose_rows(tensor, torch.tensor([1, 0]))
    assert [part.tolist() for part in found.unbind()] == [tensor.unbind()[number].tolist() for number in (1, 0)]
    assert (found.layout, found.dtype, count_rows(tensor)) == (tensor.layout, tensor.dtype, tensor.size(0))


def test_choose_when_values_are_listed_then_of_each() -> None:
    values = {"l": ["a", "b", "c"], "n": {"t": (torch.ones(2), torch.ones(0), torch.ones(1))}, "a": np.arange(3)}
    found = choose_rows(values, torch.tensor([2, 0]))
    assert (found["l"], [len(each) for each in found["n"]["t"]], found["a"].tolist()) == (["c", "a"], [1, 2], [2, 0])
    assert choose_rows(values["a"], slice(1, 2)).tolist() == [1]
    assert choose_rows(values["l"], slice(1, 2)) == ["b"]
    assert count_rows(values) == 3
    assert [count_rows(each) for each in ({**values, "x": [1]}, 3, "abc", torch.tensor(1))] == [None] * 4
