"""Tensordicts become dicts of arrays that share their memory."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from tensordict import NonTensorStack, TensorDict, lazy_stack
from tensordict.nn import TensorDictParams

from tdserve.structure.building.array_views import to_arrays
from tests.tensordict_strategies import Inner


def test_tensordict_when_of_dense_tensors_then_nested_dicts_of_the_same_memory() -> None:
    td = TensorDict({"x": torch.zeros(3, 2), "n": {"y": torch.arange(3)}}, [3])
    found = to_arrays(td)
    found["x"][1] = 7
    assert td["x"][1].tolist() == [7, 7]
    assert found["n"]["y"].tolist() == [0, 1, 2]
    assert type(found) is type(found["n"]) is dict


@pytest.mark.parametrize(
    ("dtype", "wider"),
    [(torch.bfloat16, "f4"), (torch.float8_e4m3fn, "f4"), (torch.float8_e5m2, "f4"), (torch.complex32, "c8")],
    ids=str,
)
def test_tensor_when_numpy_lacks_its_dtype_then_one_that_holds_its_values(dtype: torch.dtype, wider: str) -> None:
    found = to_arrays(torch.tensor([1.5, -2.0]).to(dtype))
    assert found.dtype == np.dtype(wider)
    assert found.tolist() == [1.5, -2.0]


@pytest.mark.parametrize(
    "dtype", ["bool", "uint8", "int8", "int16", "int32", "int64", "uint16", "uint32", "uint64", "float16"]
)
def test_tensor_when_numpy_has_its_dtype_then_that(dtype: str) -> None:
    assert to_arrays(torch.ones(2).to(getattr(torch, dtype))).dtype == np.dtype(dtype)


def test_tensor_when_it_requires_grad_or_is_a_view_of_another_kind_then_its_numbers() -> None:
    module = torch.nn.Linear(2, 1)
    found = to_arrays(TensorDict.from_module(module))
    assert np.shares_memory(found["weight"], module.weight.detach().numpy())
    assert to_arrays(TensorDictParams(TensorDict({"w": torch.ones(2)})))["w"].tolist() == [1, 1]
    assert to_arrays(torch.tensor([1j]).conj()).tolist() == [-1j]
    assert to_arrays(torch.tensor([1j]).conj().imag).tolist() == [-1]


def test_values_when_not_of_tensors_then_they_themselves() -> None:
    td = TensorDict({"one": "a", "each": NonTensorStack("x", "y"), "none": None}, [2])
    assert to_arrays(td) == {"one": "a", "each": ["x", "y"], "none": None}


@pytest.mark.parametrize("found", [None, "text", {"a": [1]}, 3], ids=str)
def test_found_when_it_is_no_tensor_then_as_it_is(found: Any) -> None:
    assert to_arrays(found) is found


def test_instance_when_of_a_tensorclass_then_its_fields() -> None:
    found = to_arrays(Inner(z=torch.arange(2), tag="t", batch_size=[2]))
    assert (found["z"].tolist(), found["tag"]) == ([0, 1], "t")


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layout", [torch.jagged, torch.strided])
def test_nested_tensor_when_shown_then_a_list_of_arrays(layout: torch.layout) -> None:
    nested = torch.nested.nested_tensor([torch.arange(2), torch.arange(3)], layout=layout)
    assert [row.tolist() for row in to_arrays(TensorDict({"t": nested}, [2]))["t"]] == [[0, 1], [0, 1, 2]]


def test_lazy_stack_when_shown_then_arrays_where_rows_are_alike_and_lists_elsewhere() -> None:
    rows = [
        TensorDict({"a": torch.ones(2), "n": {"b": torch.zeros(())}, "t": torch.zeros(size), "s": "x"})
        for size in (1, 3)
    ]
    rows[1]["more"] = torch.ones(())
    found = to_arrays(lazy_stack(rows))
    assert found["a"].shape == (2, 2)
    assert found["n"]["b"].shape == (2,)
    assert [row.shape for row in found["t"]] == [(1,), (3,)]
    assert found["s"] == ["x", "x"]
    assert (found["more"][0], found["more"][1].tolist()) == (None, 1)


def test_lazy_stack_when_along_another_dimension_then_rows_come_first() -> None:
    stack = lazy_stack([TensorDict({"a": torch.full((3,), float(at))}, [3]) for at in range(2)], 1)
    assert to_arrays(stack)["a"].tolist() == [[0, 1]] * 3
