"""The elements of a batch, and leaves in the form in which they are wanted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import LazyStackedTensorDict, NonTensorData, NonTensorStack, TensorDict, lazy_stack

from tdserve.structure.stacks.elements import (
    convert_to_dense,
    convert_to_ragged,
    flatten_elements,
    list_values,
    make_nested_leaf,
    restack_by_rows,
    split_elements,
    to_declared,
    unbind,
)
from tdserve.structure.trees.nodes import PACKED, Form, Ragged, TensorLeaf, ValueLeaf
from tests.ragged import CASES, Turns, jagged, made, rows

WANTED = ValueLeaf((9,), True, Ragged(Form.JAGGED, "int64", (-1,)))


def test_elements_of_when_there_is_no_batch_size_then_the_whole() -> None:
    td = TensorDict({})
    assert split_elements(td, ()) is td


def test_elements_of_when_it_is_a_lazy_stack_then_its_own_rows() -> None:
    stack = lazy_stack(rows(1, 2))
    assert split_elements(stack, (2,))[1] is stack[1]


def test_elements_of_when_batch_has_two_dimensions_then_lists_in_lists() -> None:
    found = split_elements(TensorDict({"a": torch.arange(6).view(2, 3)}, [2, 3]), (2, 3))
    assert [[int(element["a"]) for element in row] for row in found] == [[0, 1, 2], [3, 4, 5]]


def test_elements_of_when_a_stack_of_instances_along_another_dimension_then_stacks_of_instances() -> None:
    members = [made(role=role, content="", tokens=torch.ones(2, 1), batch_size=[2]) for role in "ab"]
    found = split_elements(LazyStackedTensorDict(*members, stack_dim=1, stack_dim_name="turn"), (2,))
    assert [type(element) for element in found] == [LazyStackedTensorDict] * 2
    assert [[member.role for member in element.tensordicts] for element in found] == [["a", "b"]] * 2
    assert [element.names for element in found] == [["turn"]] * 2


def test_unbound_when_an_instance_then_instances_with_what_lies_beside_it() -> None:
    instance = made(role="user", content="a", tokens=torch.tensor([[1], [2]]), batch_size=[2])
    found = unbind(instance, 0)
    assert [type(row) for row in found] == [Turns, Turns]
    assert [(row.role, int(row.tokens)) for row in found] == [("user", 1), ("user", 2)]


def single(data: Any) -> Any:
    return NonTensorData(data=data)


@pytest.mark.parametrize(
    "stack",
    [
        NonTensorStack("a", {"b": [1]}, None, b"c"),
        NonTensorStack(single(range(2)), single(torch.ones(2)), single(NonTensorStack)),
        NonTensorStack(NonTensorStack("a", "b"), NonTensorStack("c", "d")),
        NonTensorStack(NonTensorStack("a", "b"), NonTensorStack("c", "d"), stack_dim=1),
        NonTensorStack(NonTensorStack("a"), NonTensorStack("c", "d")),
        NonTensorStack(NonTensorData(data="a", batch_size=[2]), NonTensorData(data="b", batch_size=[2])),
        NonTensorStack(single("a"), single("b"))[:0],
    ],
)
def test_values_of_when_any_stack_then_what_its_list_is(stack: NonTensorStack) -> None:
    assert [repr(value) for value in list_values(stack)] == [repr(value) for value in stack.tolist()]


def test_values_of_when_processes_share_them_then_the_values_themselves(tmp_path: Path) -> None:
    td = TensorDict({"v": NonTensorStack(single("a"), single(3))}, [2])
    for shared in (td.clone().share_memory_(), td.memmap_(str(tmp_path), share_non_tensor=True)):
        assert list_values(shared.get("v")) == ["a", 3]


def test_flat_elements_when_nested_then_in_order() -> None:
    assert flatten_elements([[1, 2], [3]], 2) == [1, 2, 3]
    assert flatten_elements([1, 2], 1) == [1, 2]
    assert flatten_elements(1, 0) == [1]


@pytest.mark.parametrize(
    ("case", "leaf"),
    [
        ("jagged", ValueLeaf((3,), True, Ragged(Form.JAGGED, "int64", (-1,)))),
        ("jagged, with lengths", ValueLeaf((2,), True, Ragged(Form.JAGGED, "float32", (-1, 2), True))),
        ("jagged, transposed", ValueLeaf((2,), True, Ragged(Form.JAGGED, "int64", (4, -1)))),
        ("jagged, two batch dimensions", ValueLeaf((2, 4), True, Ragged(Form.JAGGED, "int64", (-1,)))),
        ("jagged, no batch", ValueLeaf((), False, PACKED)),
        ("strided", ValueLeaf((2,), True, Ragged(Form.NESTED, "float32", (-1, -1)))),
    ],
)
def test_nested_leaf_when_tensor_is_nested_then_has_the_dimensions_that_may_differ(case: str, leaf: ValueLeaf) -> None:
    td = CASES[case]
    assert make_nested_leaf(td["t"], tuple(td.batch_size))[0] == leaf


def test_ragged_of_dense_when_it_fits_then_rows() -> None:
    found = convert_to_ragged(torch.arange(6).view(2, 3), WANTED, TensorLeaf("int64", (2, 3)))
    assert found is not None
    leaf, elements = found
    assert leaf == ValueLeaf((2,), True, WANTED.ragged)
    assert [element.tolist() for element in elements] == [[0, 1, 2], [3, 4, 5]]


@pytest.mark.parametrize("leaf", [TensorLeaf("float32", (2, 3)), TensorLeaf("int64", (2, 3, 1))])
def test_ragged_of_dense_when_dtype_or_dimensions_differ_then_none(leaf: TensorLeaf) -> None:
    assert convert_to_ragged(torch.zeros(leaf.shape), WANTED, leaf) is None


def test_dense_of_ragged_when_all_have_one_shape_then_dense() -> None:
    leaf, elements = make_nested_leaf(jagged([2, 2]), (2,))
    dense = convert_to_dense(elements, leaf, TensorLeaf("int64", (2, 2)))
    assert dense is not None
    assert dense.shape == (2, 2)
    leaf, elements = make_nested_leaf(jagged([2, 1]), (2,))
    assert convert_to_dense(elements, leaf, TensorLeaf("int64", (2, 2))) is None


def test_to_declared_when_a_fixed_size_differs_then_it_is_free_in_the_shape() -> None:
    elements = [torch.zeros(1, 2), torch.zeros(3, 2)]
    leaf = ValueLeaf((2,), True, Ragged(Form.STACK, "float32", (-1, -1)))
    wanted = Ragged(Form.JAGGED, "float32", (-1, 2))
    assert to_declared(elements, leaf, wanted).ragged == wanted
    elements[1] = torch.zeros(3, 5)
    assert to_declared(elements, leaf, wanted).ragged == wanted._replace(shape=(-1, -1))


def test_by_rows_when_stacked_along_another_dimension_then_rows_in_front() -> None:
    stack = LazyStackedTensorDict(
        *[TensorDict({"x": torch.full((2, size), size)}, [2]) for size in (1, 3)], stack_dim=1, stack_dim_name="agent"
    )
    found = restack_by_rows(stack)
    assert (found.stack_dim, found.batch_size, found[1].names) == (0, stack.batch_size, ["agent"])
    assert [element["x"].tolist() for element in found[1].tensordicts] == [[1], [3, 3, 3]]
    assert restack_by_rows(found) is found
