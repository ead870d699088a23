"""Ragged leaves and packed nodes in a tensordict, and tensordicts that take over the content of another."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tensordict import NonTensorStack, TensorDict, lazy_stack

from tdserve.base.errors import NotSupportedError
from tdserve.structure.building.assembly import PackedNode, RowsWithColumns, assign, build_entry, take_columns
from tdserve.structure.trees.nodes import PACKED, Form, Node, Ragged, ValueLeaf
from tests.ragged import CASES, check_same, made, rows, turn_rows

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


def _make_rows(*rows: dict[str, Any]) -> Any:
    return lazy_stack([TensorDict(row, []) for row in rows])


def _count_up(*sizes: int) -> torch.Tensor:
    return torch.arange(float(torch.Size(sizes).numel())).view(sizes)


def test_assign_when_the_source_lacks_keys_then_they_are_removed_at_every_level() -> None:
    zeros = torch.zeros(2)
    target = _make_rows(
        {"a": zeros.clone(), "gone": zeros, "n": TensorDict({"b": zeros.clone(), "gone": zeros}, [])},
        {"a": zeros.clone(), "n": TensorDict({"b": zeros.clone()}, [])},
    )
    source = _make_rows(
        {"a": _count_up(2), "n": TensorDict({"b": _count_up(2)}, [])},
        {"a": _count_up(2), "n": TensorDict({"b": _count_up(2), "new": _count_up(3)}, [])},
    )
    kept = target.tensordicts[0]["a"]
    assign(target, source)
    check_same(source, target)
    assert target.tensordicts[0]["a"] is kept
    assert set(target.tensordicts[0].keys(True)) == {"a", "n", ("n", "b")}


def test_assign_when_an_entry_becomes_a_stack_of_rows_that_differ_then_no_key_is_lost() -> None:
    target = _make_rows({"n": TensorDict({"a": torch.zeros(2, 1)}, [2])}, {})
    differing = _make_rows({"a": _count_up(1)}, {"a": _count_up(1), "b": _count_up(2)})
    assign(target, _make_rows({"n": differing}, {}))
    check_same(differing, target.tensordicts[0]["n"])


def test_assign_when_a_row_has_another_class_then_it_has_that_of_the_source() -> None:
    target = _make_rows({"n": TensorDict({"role": "user", "content": "no"}, [])}, {})
    source = _make_rows({"n": made(role="user", content="yes")}, {})
    assign(target, source)
    check_same(source, target)


def test_assign_when_no_row_of_the_source_differs_then_a_dense_destination_takes_them() -> None:
    target = TensorDict({"a": torch.zeros(2, 2)}, [2]).lock_()
    assign(target, _make_rows({"a": _count_up(2)}, {"a": _count_up(2)}))
    assert target["a"].tolist() == [[0.0, 1.0], [0.0, 1.0]]


def test_assign_when_a_dense_destination_cannot_hold_rows_that_differ_then_refuses() -> None:
    target = TensorDict({"a": torch.zeros(2, 2)}, [2])
    with pytest.raises(NotSupportedError, match="rows that differ"):
        assign(target, _make_rows({"a": _count_up(2)}, {"a": _count_up(2), "b": _count_up(1)}))
    assert not target["a"].any()


def test_assign_when_a_later_row_is_locked_then_nothing_is_written() -> None:
    target = _make_rows({"a": torch.zeros(2)}, {"a": torch.zeros(2), "gone": torch.zeros(1)})
    target.tensordicts[1].lock_()
    with pytest.raises(NotSupportedError, match="locked"):
        assign(target, _make_rows({"a": _count_up(2)}, {"a": _count_up(2)}))
    assert target.tensordicts[0]["a"].tolist() == [0.0, 0.0]
    assert target.tensordicts[1].sorted_keys == ["a", "gone"]


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
