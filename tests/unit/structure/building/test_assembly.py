"""Ragged leaves and packed nodes in a tensordict, and tensordicts that take over the content of another."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tensordict import NonTensorStack, TensorDict, lazy_stack

from tdserve.base.errors import NotSupportedError
from tdserve.structure.building.assembly import PackedNode, RowsWithColumns, assign, build_entry, take_columns
from tdserve.structure.trees.nodes import PACKED, Form, Node, Ragged, ValueLeaf
from tests.ragged import CASES, check_same, rows, turn_rows

JAGGED = Ragged(Form.JAGGED, "float32", (-1,))

NODE = PackedNode.from_node(Node((2,), None, None, None, (), inner=(-1,)), (), None)


def test_entry_of_when_batch_has_two_dimensions_then_components_of_the_first() -> None:
    elements = [[torch.ones(3), torch.ones(3)], [torch.ones(1), torch.ones(1)]]
    found = build_entry(ValueLeaf((2, 2), True, JAGGED), elements, None)
    assert [list(part.shape) for part in found.unbind()] == [[2, 3], [2, 1]]


def test_entry_of_when_the_second_dimension_differs_then_not_supported() -> None:
    elements = [[torch.ones(3), torch.ones(2)]]
    with pytest.raises(NotSupportedError, match="index one dimension"):
        build_entry(ValueLeaf((1, 2), True, JAGGED), elements, None)


def test_entry_of_when_it_is_one_element_then_the_tensor_itself() -> None:
    tensor = torch.ones(3)
    assert build_entry(ValueLeaf((), False, JAGGED), tensor, None) is tensor


def test_entry_of_when_nothing_was_written_then_none() -> None:
    found = build_entry(ValueLeaf((2,), True, PACKED), [None, None], None)
    assert found.tolist() == [None, None]
    assert isinstance(found, NonTensorStack)


def test_node_of_when_an_element_was_not_written_then_empty() -> None:
    found = NODE.build([None, *turn_rows(3)], build_member=id)
    assert found.batch_size == torch.Size([2, -1])
    assert found[0].batch_size == torch.Size([0])


def test_node_of_when_the_dimension_of_its_elements_is_named_then_the_stack_is() -> None:
    found = NODE._replace(names=("time",)).build(turn_rows(2, 3), build_member=id)
    assert found.names == ["time", None]


def test_taken_when_dimension_is_not_the_first_then_columns() -> None:
    assert take_columns([[1, 2], [3, 4]], 0) == [[1, 2], [3, 4]]
    assert take_columns([[1, 2], [3, 4]], 1) == [[1, 3], [2, 4]]


@pytest.mark.parametrize("case", ["jagged", "stack", "stack in a dense one", "histories", "ragged values", "strided"])
def test_assign_when_destination_holds_something_else_then_it_holds_the_source(case: str) -> None:
    source = CASES[case]
    target = source.clone()
    if not source.get("t", torch.ones(1)).is_nested:
        target.apply_(lambda tensor: tensor.zero_())
    assign(target, source)
    check_same(source, target)


def test_assign_when_tensors_are_dense_then_in_place() -> None:
    target = lazy_stack(rows(3, 1))
    held = target[0]["r"]
    assign(target, lazy_stack(rows(2, 5)))
    assert held.data_ptr() == target[0]["r"].data_ptr()
    assert target[1]["a"].shape == (5,)


def test_assign_when_batch_size_differs_then_the_row_is_replaced() -> None:
    target, source = lazy_stack(turn_rows(3, 1)), lazy_stack(turn_rows(2, 1))
    assign(target, source)
    check_same(source, target)


def test_assign_when_destination_is_locked_then_refuses() -> None:
    with pytest.raises(NotSupportedError, match="locked"):
        assign(CASES["jagged"].clone().lock_(), CASES["jagged"])


def test_rows_with_columns_when_asked_for_a_key_then_looks_beside_first() -> None:
    found: Any = RowsWithColumns.from_rows(lazy_stack(turn_rows(3, 1)), {"index": torch.arange(2)})
    assert found["index"].tolist() == [0, 1]
    assert found.get("index").tolist() == [0, 1]
    assert found.to("cpu")["index"].tolist() == [0, 1]
    assert found.get("a", as_list=True)[1].shape == (1, 2)
    assert isinstance(found[0], TensorDict)


def test_rows_with_columns_when_cloned_or_indexed_then_columns_come_along() -> None:
    found: Any = RowsWithColumns.from_rows(lazy_stack(turn_rows(3, 1, 2)), {"index": torch.tensor([7, 8, 9])})
    for same in (found.clone(), found.clone(recurse=False), found[:]):
        assert same["index"].tolist() == [7, 8, 9]
        check_same(lazy_stack(found.tensordicts), lazy_stack(same.tensordicts))
    assert found.clone()["index"].data_ptr() != found["index"].data_ptr()
    assert found[1:]["index"].tolist() == [8, 9]
    assert found[torch.tensor([2, 0])]["index"].tolist() == [9, 7]
    assert found[[True, False, True]]["index"].tolist() == [7, 9]
