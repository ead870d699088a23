"""The common structure of a lazy stack's rows, and what a packed node stores about its elements."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tensordict import TensorDict, lazy_stack

from tdserve.structure.captures.capture import capture
from tdserve.structure.stacks.common_structure import CapturedPart, join_parts, summarise, wrap_element
from tdserve.structure.trees.nodes import PACKED, Form, Node, Ragged, TensorLeaf, ValueLeaf
from tests.ragged import rows, split_turns, turns


def parts(*tds: Any) -> list[CapturedPart]:
    found = [capture(td) for td in tds]
    return [CapturedPart(each.spec.root, each.tensors, each.values) for each in found]


def test_stacked_when_shapes_differ_then_ragged_where_they_do() -> None:
    found = join_parts(parts(*rows(3, 1)), 0, path=(), names=("n",))
    assert found is not None
    assert (found.root.batch_size, found.root.stack_dim, found.root.names) == ((2,), 0, ("n",))
    assert dict(found.root.entries) == {
        "a": ValueLeaf((2,), True, Ragged(Form.STACK, "float32", (-1,))),
        "s": ValueLeaf((2,), True),
        "r": TensorLeaf("float32", (2, 2)),
    }
    assert found.values["s",] == ["3", "1"]
    assert found.tensors["r",].shape == (2, 2)


def test_stacked_when_there_is_one_row_then_any_size_may_come() -> None:
    found = join_parts(parts(*rows(3)), 0, path=(), names=None)
    assert found is not None
    assert dict(found.root.entries)["r"] == ValueLeaf((1,), True, Ragged(Form.STACK, "float32", (-1,)))


def test_stacked_when_along_another_dimension_then_elements_in_order_of_the_batch() -> None:
    tds = [TensorDict({"a": torch.full((2, size), float(size))}, [2]) for size in (1, 3)]
    found = join_parts(parts(*tds), 1, path=(), names=None)
    assert found is not None
    assert found.root.batch_size == (2, 2)
    assert [[len(element) for element in row] for row in found.values["a",]] == [[1, 3], [1, 3]]


@pytest.mark.parametrize(
    "other",
    [
        TensorDict({"a": torch.zeros(3)}),
        TensorDict({"a": torch.zeros(3), "b": torch.zeros(2, dtype=torch.int64)}),
        TensorDict({"a": torch.zeros(3), "b": torch.zeros(2, 1)}),
        TensorDict({"a": torch.zeros(3), "b": "text"}),
        TensorDict({"a": torch.zeros(3), "b": TensorDict({})}),
        TensorDict({"a": torch.zeros(3), "c": torch.zeros(2)}),
        TensorDict({"a": torch.zeros(3), "b": torch.zeros(3, 2)}, [3]),
    ],
)
def test_stacked_when_rows_differ_in_structure_then_none(other: TensorDict) -> None:
    row = TensorDict({"a": torch.zeros(3), "b": torch.zeros(2)})
    assert join_parts(parts(row, other), 0, path=(), names=None) is None


def test_stacked_when_rows_are_instances_then_none() -> None:
    assert join_parts(parts(turns(2), turns(2)), 0, path=(), names=None) is None


def test_known_of_when_elements_differ_then_minus_one_where_they_do() -> None:
    inner, entries = summarise([part.root for part in parts(turns(2, tokens=torch.zeros(2, 5)), turns(3))], (2,))
    assert inner == (-1,)
    assert dict(entries)["tokens"] == ValueLeaf((2,), True, Ragged(Form.STACK, "float32", (-1, 5)))


def test_known_of_when_elements_are_stacks_then_entries_are_as_free_as_batch_sizes() -> None:
    alike = [lazy_stack([TensorDict({"a": torch.zeros(5)}) for _ in range(2)]) for _ in range(2)]
    inner, entries = summarise([part.root for part in parts(*alike)], (2,))
    assert inner == (-1,)
    assert dict(entries)["a"] == ValueLeaf((2,), True, Ragged(Form.STACK, "float32", (-1, 5)))


def test_known_of_when_a_key_holds_different_things_then_only_that_it_is_there() -> None:
    one, other = TensorDict({"a": torch.zeros(3), "n": {"x": torch.zeros(1)}}), TensorDict({"a": "text", "n": {}})
    _, entries = summarise([part.root for part in parts(one, other)], (2,))
    assert dict(entries)["a"] == ValueLeaf((2,), True, PACKED)
    node = dict(entries)["n"]
    assert isinstance(node, Node)
    assert [key for key, _ in node.entries] == ["x"]


def test_known_of_when_an_element_is_a_stack_of_unequal_rows_then_describes_the_whole() -> None:
    node = capture(TensorDict({"h": split_turns({"f": 1}, None)})).spec.find(("h",))
    assert isinstance(node, Node)
    assert node.inner == (-1,)
    assert dict(node.entries)["tokens"] == ValueLeaf((), True, Ragged(Form.STACK, "float32", (-1, -1)))


def test_as_element_when_of_a_packed_node_then_its_rows_are_no_batch_any_more() -> None:
    alike = [lazy_stack([TensorDict({"a": torch.zeros(5)}) for _ in range(2)]) for _ in range(3)]
    packed = capture(lazy_stack(alike)).spec.root
    assert (packed.batch_size, packed.inner) == ((3,), (-1,))
    element = wrap_element(packed)
    assert (element.batch_size, element.inner) == ((), (-1, -1))
    assert dict(element.entries)["a"] == ValueLeaf((), False, Ragged(Form.STACK, "float32", (-1, -1, 5)))
