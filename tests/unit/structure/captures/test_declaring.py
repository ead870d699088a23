"""Rows in which something is declared ragged, and rows that are found to be."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tensordict import LazyStackedTensorDict, NonTensorStack, TensorDict, lazy_stack

from tdserve.base.errors import InvalidRequestError, KeyNotFoundError
from tdserve.structure.captures.capture import capture
from tdserve.structure.captures.declaring import (
    declare_ragged,
    is_widened,
    list_declared_paths,
    make_first_values,
    make_zeros,
    widen_row,
)
from tdserve.structure.trees.nodes import Form, Node, Ragged, ValueLeaf
from tdserve.structure.trees.tree import Spec
from tests.errors import raises
from tests.ragged import jagged, split_turns, strided, turns

ROW = TensorDict({"t": torch.zeros(4, dtype=torch.int64), "n": {"x": torch.zeros(2, 3)}, "s": "text"})


def declare(td: Any, ragged: Any = None) -> Spec:
    captured = capture(td)
    return declare_ragged(captured.spec, captured.values, ragged, store="frames")


@pytest.mark.parametrize("ragged", ["t", ["t"], ("t",), {"t": 0}, {"t": (0,)}, {("t",): -1}])
def test_declare_ragged_when_one_dimension_of_a_row_differs_then_jagged(ragged: Any) -> None:
    spec = declare(ROW, ragged)
    assert spec.find(("t",)) == ValueLeaf((), False, Ragged(Form.JAGGED, "int64", (-1,)))
    assert spec.root.stack_dim is None


@pytest.mark.parametrize(("dims", "shape"), [((0, 1), (-1, -1)), (1, (2, -1))])
def test_declare_ragged_when_other_dimensions_differ_then_a_stack_of_rows(dims: Any, shape: tuple[int, ...]) -> None:
    spec = declare(ROW, {("n", "x"): dims})
    assert spec.find(("n", "x")) == ValueLeaf((), False, Ragged(Form.STACK, "float32", shape))
    node = spec.prepend((5,)).find(("n",))
    assert isinstance(node, Node)
    assert node.stack_dim == 0
    assert spec.root.stack_dim is None


def test_declare_ragged_when_nothing_is_then_the_same_spec() -> None:
    spec = capture(ROW).spec
    assert declare_ragged(spec, {}, None, store="") is spec


def test_declare_ragged_when_row_has_a_nested_tensor_of_one_component_then_it_is_ragged() -> None:
    spec = declare(TensorDict({"t": jagged([4], (2,)), "u": strided((2, 3))}, []))
    assert spec.find(("t",)) == ValueLeaf((), False, Ragged(Form.JAGGED, "int64", (-1, 2)))
    assert spec.find(("u",)) == ValueLeaf((), False, Ragged(Form.NESTED, "float32", (-1, -1)))


@pytest.mark.parametrize("history", [turns(3, tokens=torch.zeros(3, 5)), split_turns(None, None)])
def test_declare_ragged_when_a_part_is_named_or_a_stack_then_packed(history: Any) -> None:
    spec = declare(TensorDict({"h": history}), ["h"])
    node = spec.find(("h",))
    assert isinstance(node, Node)
    assert node.inner == (-1,)
    assert spec.packed == {("h",)}
    assert declare(history, [()]).packed == {()}


@pytest.mark.parametrize(
    "ragged", [{"t": 1}, {"t": ()}, {"t": "0"}, {"t": True}, ["s"], ["n"], [3], {("n", "x"): (0, 5)}]
)
def test_declare_ragged_when_it_does_not_fit_then_invalid_request(ragged: Any) -> None:
    with raises(InvalidRequestError, argument="ragged"):
        declare(ROW, ragged)


def test_declare_ragged_when_key_is_unknown_then_names_it() -> None:
    with raises(KeyNotFoundError, key="nothing"):
        declare(ROW, ["nothing"])


def test_declare_ragged_when_a_batch_dimension_of_the_row_is_named_then_invalid_request() -> None:
    with pytest.raises(InvalidRequestError, match="after its batch dimensions"):
        declare(TensorDict({"t": torch.zeros(2, 3)}, [2]), ["t"])


def test_first_values_when_store_is_ragged_then_empty() -> None:
    row = TensorDict({"t": torch.zeros(4), "s": NonTensorStack("a", "b"), "h": turns(2)})
    captured = capture(row)
    spec = declare_ragged(captured.spec, captured.values, ["t", "h"], store="").prepend((3,))
    reduced, values = make_first_values(spec.select([path for path, _ in spec.values]), captured.values, (3,))
    assert values["t",].shape == (0,)
    assert values["h",] == [None] * 3
    assert values["s",] == [["a", "b"]] * 3
    assert dict(reduced.values)["t",].per_row is False


def test_first_values_when_zeros_are_given_then_each_row_has_them() -> None:
    captured = capture(TensorDict({"h": turns(2)}))
    spec = declare_ragged(captured.spec, captured.values, ["h"], store="").prepend((3,))
    zero = make_zeros(turns(2))
    _, values = make_first_values(spec.select([("h",)]), captured.values, (3,), {("h",): zero})
    assert [value is zero for value in values["h",]] == [True] * 3


def test_zeros_of_when_of_a_stack_then_its_structure_and_nothing_of_it_is_changed() -> None:
    stack = lazy_stack([TensorDict({"t": torch.ones(size), "s": "text"}) for size in (2, 3)])
    zeros = make_zeros(stack)
    assert [row["t"].tolist() for row in zeros.unbind(0)] == [[0, 0], [0, 0, 0]]
    assert zeros[0]["s"] == "text"
    assert stack[0]["t"].tolist() == [1, 1]
    assert make_zeros(stack.apply(lambda x: x.to("meta")))[1]["t"].tolist() == [0, 0, 0]


def test_declared_paths_when_asked_then_keys_and_nested_rows() -> None:
    captured = capture(TensorDict({"t": torch.zeros(4), "j": jagged([3])}))
    assert list_declared_paths(captured.spec, captured.values, {"t": 0}) == {("t",), ("j",)}


def test_declare_ragged_when_the_row_is_packed_itself_then_it_is_one_element() -> None:
    spec = declare(lazy_stack([TensorDict({"a": torch.zeros(3)}), TensorDict({"b": torch.zeros(3)})]))
    assert (spec.batch_size, spec.root.inner) == ((), (-1,))


BATCHES = {
    "jagged": (TensorDict({"t": jagged([3, 1])}, [2]), Ragged(Form.JAGGED, "int64", (-1,))),
    "jagged, one row": (TensorDict({"t": jagged([3])}, [1]), Ragged(Form.JAGGED, "int64", (-1,))),
    "strided": (TensorDict({"t": strided((3, 2), (3, 4))}, [2]), Ragged(Form.NESTED, "float32", (3, -1))),
    "stack": (
        lazy_stack([TensorDict({"t": torch.zeros(3, size)}) for size in (2, 4)]),
        Ragged(Form.STACK, "float32", (3, -1)),
    ),
}


@pytest.mark.parametrize("case", BATCHES)
def test_widen_row_when_first_rows_are_ragged_then_so_is_the_row(case: str) -> None:
    batch, ragged = BATCHES[case]
    row = capture(batch[0]).spec
    spec = widen_row(row, capture(batch))
    assert spec is not None
    assert spec.find(("t",)) == ValueLeaf((), False, ragged)
    assert is_widened(row, spec)
    assert not is_widened(row, row)


def test_widen_row_when_rows_of_a_stack_have_one_other_shape_then_ragged() -> None:
    row = capture(TensorDict({"t": torch.zeros(3)})).spec
    spec = widen_row(row, capture(lazy_stack([TensorDict({"t": torch.zeros(5)})] * 2)))
    assert spec is not None
    assert spec.root.stack_dim == -1


def test_widen_row_when_histories_come_then_packed() -> None:
    batch = TensorDict({"h": lazy_stack([turns(2), turns(3)])}, [2])
    row = capture(batch[0]).spec
    spec = widen_row(row, capture(batch))
    assert spec is not None
    assert spec.packed == {("h",)}
    assert is_widened(row, spec)


@pytest.mark.parametrize(
    "batch",
    [
        TensorDict({"t": torch.zeros(2, 5)}, [2]),
        TensorDict({"t": jagged([3, 1])}, [2]),
        TensorDict({"t": jagged([3, 1], (2,), torch.float32)}, [2]),
        TensorDict({"u": jagged([3, 1])}, [2]),
    ],
)
def test_widen_row_when_something_else_differs_then_none(batch: TensorDict) -> None:
    assert widen_row(capture(TensorDict({"t": torch.zeros(3)})).spec, capture(batch)) is None


def test_widens_when_structures_differ_otherwise_then_not() -> None:
    row = capture(ROW).spec
    assert not is_widened(
        row, declare(TensorDict({"t": torch.zeros(4), "n": {"x": torch.zeros(2, 3)}, "s": "t"}), ["t"])
    )
    assert not is_widened(row, declare(ROW.exclude("s"), ["t"]))
    assert is_widened(row, declare(ROW, {"t": 0, ("n", "x"): 1}))


def test_widen_row_when_dimensions_have_names_then_they_keep_them() -> None:
    members = [TensorDict({"x": torch.ones(4, 3), "word": "a"}, [4]) for _ in range(2)]
    agents = LazyStackedTensorDict(*members, stack_dim=1, stack_dim_name="agent")
    batch = TensorDict({"agents": agents}, [4, 2], names=["time", "agent"])
    row = capture(batch[0])
    found = widen_row(declare_ragged(row.spec, row.values, None, store="s"), capture(batch))
    assert found is not None
    node = found.find(("agents",))
    assert isinstance(node, Node)
    assert (node.names, node.inner) == (("agent",), ())
