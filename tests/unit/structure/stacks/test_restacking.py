"""Stacks that are rebuilt from the elements of their batch, along any dimension."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from tensordict import LazyStackedTensorDict, NonTensorData, NonTensorStack, TensorClass, TensorDict, UnbatchedTensor

from tdserve.structure.building.build import build
from tdserve.structure.building.deferred import Deferred
from tdserve.structure.building.packing import pack, unpack
from tdserve.structure.captures.capture import capture
from tdserve.structure.stacks.restacking import build_stack, join, restack
from tdserve.structure.trees import codec
from tdserve.structure.trees.nodes import Node, make_packed_leaf
from tdserve.structure.trees.tree import Spec
from tests.sameness import assert_same

SHAPES = ((2,), (1,), (2, 3), (2, 1), (2, 3, 4), (1, 2, 1))

NAMES = ("time", "step", "agent")

PLACES = [
    (shape, dim, depth) for shape in SHAPES for dim in range(len(shape)) for depth in range(min(2, len(shape)) + 1)
]
"""Cases: the batch size of a stack, the dimension along which it is stacked, and the number of dimensions of the
tensordict around it."""


Unbatched: Any = UnbatchedTensor  # its constructor has no annotations


class Seen(TensorClass):
    """The observations of an agent; not every agent has every key."""

    x: torch.Tensor
    word: str = ""
    y: torch.Tensor | None = None


def keys(number: int, inner: tuple[int, ...]) -> Any:
    """Returns a member with keys of its own."""
    return TensorDict({f"x{number}": torch.rand(*inner, number + 1), "y": torch.rand(*inner, 2)}, inner)


def everything(number: int, inner: tuple[int, ...]) -> Any:
    """Returns a member with keys of its own and with non-tensor values."""
    below = TensorDict({"z": torch.rand(*inner, 2), **({"w": torch.ones(*inner, 1)} if number else {})}, inner)
    return TensorDict(
        {
            f"x{number}": torch.ones(*inner, number + 1).to(torch.uint16),
            "n": below,
            "v": "word",
            "u": Unbatched(torch.rand(3)),
            "g": torch.rand(*inner, 1).requires_grad_(),
        },
        inner,
    )


def instances(number: int, inner: tuple[int, ...]) -> Any:
    """Returns a member that is an instance."""
    more = torch.rand(*inner, 1) if number else None
    return Seen(x=torch.rand(*inner, number + 1), word=f"{number}", y=more, batch_size=list(inner))


def stacked(shape: tuple[int, ...], dim: int, depth: int, member: Any = keys, names: Any = None) -> TensorDict:
    """Returns a tensordict around a lazy stack."""
    inner = shape[:dim] + shape[dim + 1 :]
    members = [member(number, inner) for number in range(shape[dim])]
    for each in members if names else ():
        each.names = [*names[:dim], *names[dim + 1 :]]
    stack: Any = LazyStackedTensorDict(*members, stack_dim=dim, stack_dim_name=names[dim] if names else None)
    return TensorDict({"s": stack, "a": torch.rand(*shape[:depth], 2)}, shape[:depth], names=names and names[:depth])


def there_and_back(td: Any) -> Any:
    """Rebuilds a tensordict from its encoded spec and its stored elements."""
    captured = capture(td, is_exact=True)
    spec = codec.decode(codec.encode(captured.spec))
    assert spec == captured.spec
    values = dict(captured.values)
    for path in spec.packed:
        leaf = dict(spec.values)[path]
        values[path] = each(values[path], len(leaf.batch_size))
    return build(spec, captured.tensors, values)


def each(elements: Any, depth: int) -> Any:
    return unpack(pack(elements)) if not depth else [each(element, depth - 1) for element in elements]


def node_at(td: Any) -> Node:
    found = capture(td).spec.find(("s",))
    assert isinstance(found, Node)
    return found


@pytest.mark.parametrize(("shape", "dim", "depth"), PLACES)
@pytest.mark.parametrize("member", [keys, everything, instances])
def test_stack_when_nested_in_any_batch_then_comes_back_as_it_was(
    shape: tuple[int, ...], dim: int, depth: int, member: Any
) -> None:
    td = stacked(shape, dim, depth, member)
    assert_same(there_and_back(td), td)


@pytest.mark.parametrize(("shape", "dim", "depth"), PLACES)
def test_stack_when_dimensions_have_names_then_it_has_them_too(shape: tuple[int, ...], dim: int, depth: int) -> None:
    td = stacked(shape, dim, depth, everything, list(NAMES[: len(shape)]))
    assert_same(there_and_back(td), td)


def test_stack_when_locked_then_comes_back_locked() -> None:
    td = stacked((2, 3), 1, 1)
    assert_same(there_and_back(td.lock_()), td)


def test_stack_when_it_is_one_of_stacks_then_nothing_is_noted() -> None:
    rows = [LazyStackedTensorDict(keys(0, ()), keys(1, ()), stack_dim=0) for _ in range(3)]
    td = TensorDict({"s": LazyStackedTensorDict(*rows, stack_dim=0)}, [3, 2])
    assert node_at(td).stack_dim is None
    assert_same(there_and_back(td), td)


def test_stack_when_along_the_only_dimension_then_nothing_is_noted() -> None:
    assert node_at(stacked((2,), 0, 1)).stack_dim is None
    assert node_at(stacked((2, 3), 0, 1)).stack_dim is None
    assert node_at(stacked((2, 3), 1, 1)).stack_dim == 1
    assert node_at(stacked((2, 3), 0, 2)).stack_dim == 0


@pytest.mark.parametrize("dim", [0, 1, 2])
def test_stack_when_rows_are_taken_by_their_numbers_then_as_of_tensordict(dim: int) -> None:
    td = stacked((4, 2, 3), dim, 2)
    captured = capture(td)
    elements, tensor = captured.values["s",], captured.tensors["a",]
    rows = captured.spec.with_batch(1, (2,))
    assert_same(build(rows, {("a",): tensor[1:3]}, {("s",): elements[1:3]}), td[1:3])
    one = captured.spec.with_batch(1, (), moved=(None,))
    assert_same(build(one, {("a",): tensor[1]}, {("s",): elements[1]}), td[1])
    column = captured.spec.with_batch(2, (4,), moved=(0, None))
    assert_same(build(column, {("a",): tensor[:, 1]}, {("s",): [row[1] for row in elements]}), td[:, 1])
    element = captured.spec.with_batch(2, (), moved=(None, None))
    assert_same(build(element, {("a",): tensor[0, 1]}, {("s",): elements[0][1]}), td[0, 1])


def test_stack_when_elements_are_made_later_then_the_same() -> None:
    td = stacked((3, 2), 1, 1)
    captured = capture(td)
    elements = Deferred([b""] * 3, lambda blobs: list(captured.values["s",]))
    assert_same(build(captured.spec, captured.tensors, {("s",): elements}), td)


def test_restack_when_elements_are_not_written_then_empty_ones() -> None:
    found = restack([None] * 4, (2, 2), 0, None, (3,))
    assert (found.stack_dim, found.batch_size) == (0, torch.Size([2, 2, 3]))
    found = restack([None] * 2, (2,), 1, None, (0,))
    assert (found.stack_dim, found.batch_size) == (1, torch.Size([2, 0]))


def test_restack_when_some_elements_are_not_written_then_each_by_itself() -> None:
    element = LazyStackedTensorDict(keys(0, ()), keys(1, ()), stack_dim=0)
    found = restack([element, None], (2,), 1, None, (0,))
    assert found.stack_dim == 0
    assert_same(found.tensordicts[0], element)
    assert found.tensordicts[1].batch_size == torch.Size([0])


@pytest.mark.parametrize("dim", [0, 1])
def test_restack_when_there_are_no_elements_then_a_stack_of_that_shape(dim: int) -> None:
    found = restack([], (0, 2), dim, None, ())
    assert (found.stack_dim, found.batch_size) == (dim, torch.Size([0, 2]))


def test_restack_when_elements_differ_in_length_then_stacked_along_those_dimensions() -> None:
    pieces = [TensorDict({"x": torch.rand(size)}, [size]) for size in (1, 2, 3, 3)]
    found = restack(pieces, (2, 2), 2, None, (0,), ["a", None])
    assert (found.stack_dim, found.names[0]) == (0, "a")
    assert [row.stack_dim for row in found.tensordicts] == [0, 1]


def test_joined_when_elements_differ_along_one_dimension_then_stacked_along_that() -> None:
    columns = [keys(0, (3,)), keys(1, (3,))]
    elements = [column[row] for row, column in itertools.product(range(3), columns)]
    assert_same(join(elements, (3, 2), (None, None)), LazyStackedTensorDict(*columns, stack_dim=1))
    mixed: Any = join([elements[0], elements[1], elements[1], elements[0]], (2, 2), (None, None))
    assert (mixed.stack_dim, mixed.tensordicts[0].stack_dim) == (0, 0)


def test_joined_when_values_differ_then_one_for_each() -> None:
    found = join([TensorDict({"v": word}) for word in "aab"], (3,), (None,))
    assert isinstance(found.get("v"), NonTensorStack)
    assert found.get("v").tolist() == ["a", "a", "b"]
    assert isinstance(join([TensorDict({"v": "a"})] * 2, (2,), (None,)).get("v"), NonTensorData)


@pytest.mark.parametrize(
    "other",
    [
        TensorDict({"x": torch.zeros(2)}),
        TensorDict({"x": torch.zeros(1, dtype=torch.int64)}),
        TensorDict({"x": torch.zeros(1, requires_grad=True)}),
        TensorDict({"x": "text"}),
        TensorDict({"x": TensorDict()}),
        TensorDict({"x": Unbatched(torch.zeros(1))}),
        TensorDict({"x": torch.zeros(1), "y": torch.zeros(1)}),
        Seen(x=torch.zeros(1), batch_size=[]),
    ],
)
def test_joined_when_elements_do_not_agree_then_a_lazy_stack(other: Any) -> None:
    one = TensorDict({"x": torch.zeros(1)})
    for pair in ((one, other), (other, one)):
        found = join(pair, (2,), (None,))
        assert isinstance(found, LazyStackedTensorDict)
        assert [row is part for row, part in zip(found.tensordicts, pair, strict=True)] == [True, True]


def test_joined_when_stacks_have_as_many_rows_then_one_stack_of_longer_rows() -> None:
    parts: list[Any] = [LazyStackedTensorDict(keys(0, ()), keys(1, ()), stack_dim=0) for _ in range(3)]
    assert_same(join(parts, (3,), (None,)), torch.stack(parts))


def test_stack_of_when_there_are_no_rows_then_an_empty_stack() -> None:
    found = build_stack([], (3, 0), 1, None, None)
    assert isinstance(found, LazyStackedTensorDict)
    assert (found.batch_size, found.stack_dim) == (torch.Size([3, 0]), 1)


def test_fingerprint_when_stacked_otherwise_then_another_one() -> None:
    along_1 = capture(stacked((2, 2, 2), 1, 2)).spec
    along_2 = capture(stacked((2, 2, 2), 2, 2)).spec
    node = along_1.root.entries[0][1]
    assert isinstance(node, Node)
    assert make_packed_leaf(node).per_row
    assert along_1.fingerprint != along_2.fingerprint
    assert Spec(along_1.root).fingerprint == along_1.fingerprint
