"""Members that take the place of others come out as they went in."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from tensordict import LazyStackedTensorDict, NonTensorStack, TensorDict, lazy_stack

from tdserve.base.errors import NotSupportedError, SpecMismatchError
from tdserve.messages.content import select_spec
from tdserve.messages.selection.selection import encode
from tdserve.structure.building.build import build
from tdserve.structure.building.packing import pack, unpack
from tdserve.structure.captures.capture import capture, capture_packed
from tdserve.structure.stacks.elements import flatten_elements, has_notes, nest_list
from tdserve.structure.trees.nodes import Node
from tdserve.structure.trees.tree import Spec
from tests.ragged import Turns, made
from tests.sameness import assert_same
from tests.tensordict_versions import skip_old
from tests.trees import trees_around_stacks
from tests.unit.structure.building.test_gathering import KINDS, around, nested, td

pytestmark = pytest.mark.filterwarnings("ignore:.*nested tensors.*prototype")

PLACES = [(1, 1), (1, 2), (0, 2)]
"""The dimension along which members are stacked, and how many there are around the stack."""


class Store:
    """What is stored of a tensordict, and what becomes of it: its spec stays, elements are replaced.

    Args:
        first: Says what the store is.
    """

    def __init__(self, first: Any) -> None:
        captured = capture(first, is_exact=True)
        self.spec = captured.spec
        self._shape = first.batch_size
        self._values = dict(captured.values)
        self._tensors = captured.tensors

    def write(self, value: Any, index: Any = ...) -> Any:
        """Writes a part; returns the elements of the stack that were written."""
        selection = encode(index, batch_size=self.spec.batch_size, store="")
        captured = capture(value, like=select_spec(self.spec, selection, ()), is_exact=True)
        for path in self.spec.packed:
            places = torch.arange(self._shape.numel()).reshape(self._shape)[index].reshape(-1).tolist()
            flat = flatten_elements(self._values[path], len(self._shape))
            new = flatten_elements(captured.values[path], len(captured.spec.batch_size))
            for place, element in zip(places, new, strict=True):
                flat[place] = unpack(pack(element))
            self._values[path] = nest_list(flat, tuple(self._shape))
        self._tensors = captured.tensors if index is ... else self._tensors
        return captured.values["s",]

    def read(self, index: Any = ...) -> Any:
        """A part of the stack, as it lies there."""
        selection = encode(index, batch_size=self.spec.batch_size, store="")
        spec = select_spec(self.spec, selection, [("s",)])
        numbers = torch.arange(self._shape.numel()).reshape(self._shape)[index]
        flat = flatten_elements(self._values["s",], len(self._shape))
        chosen: Any = [flat[number] for number in numbers.reshape(-1).tolist()]
        chosen = nest_list(chosen, tuple(numbers.shape)) if numbers.dim() else chosen[0]
        return build(spec, {}, {("s",): chosen})["s"]


def members(kind: str) -> list[Any]:
    """Two, one of a kind."""
    return [KINDS[kind](), td(other=torch.rand(2))]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("first", ["parameter", "jagged", "lazy", "equal values", "params", "plain"])
@pytest.mark.parametrize(("dim", "depth"), PLACES)
def test_members_when_they_replace_others_then_come_out_as_they_are(
    kind: str, first: str, dim: int, depth: int
) -> None:
    plain = [td(), td(other=torch.rand(2))]
    store = Store(around(plain if first == "plain" else members(first), dim, depth))
    given = around(members(kind), dim, depth)
    store.write(given)
    assert_same(store.read(), given["s"])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("index", [0, slice(0, 1), [0]])
def test_member_when_it_takes_the_place_of_another_then_comes_out_as_it_is(kind: str, index: Any) -> None:
    first, given = around([td(), td(other=torch.rand(2))], 0, 2), around(members(kind), 0, 2)
    store = Store(first)
    store.write(given[index], index)
    assert_same(store.read(index), given[index]["s"])
    assert_same(store.read().tensordicts[0], given["s"].tensordicts[0])
    assert_same(store.read().tensordicts[1], first["s"].tensordicts[1])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("index", [0, slice(0, 1), [1, 0], (slice(None), 0)])
@pytest.mark.parametrize(("dim", "depth"), [(1, 2), (0, 2)])
def test_rows_when_read_of_members_that_replaced_others_then_as_of_those_that_were_there(
    kind: str, index: Any, dim: int, depth: int
) -> None:
    given = around(members(kind), dim, depth)
    store, made = Store(around([td(), td(other=torch.rand(2))], dim, depth)), Store(given)
    store.write(given)
    assert_same(store.read(index), made.read(index))


def test_rows_when_only_some_are_written_then_they_come_out_as_they_are_and_others_stay() -> None:
    def jagged(*sizes: int) -> torch.Tensor:
        return torch.nested.nested_tensor([torch.arange(float(size)) for size in sizes], layout=torch.jagged)

    def rows(num_rows: int, **entries: Any) -> TensorDict:
        return TensorDict({"x": torch.rand(num_rows, 3), **entries}, [num_rows])

    store = Store(around([rows(4), rows(4, other=torch.rand(4))], 1, 1))
    given = around([rows(2, y=jagged(1, 2), w=torch.nn.Parameter(torch.rand(2))), rows(2).lock_()], 1, 1)
    store.write(given, slice(1, 3))
    assert_same(store.read(slice(1, 3)), given["s"])
    assert [type(row) for row in store.read().tensordicts] == [LazyStackedTensorDict, LazyStackedTensorDict]
    part = store.read(slice(2, 3)).tensordicts[0]
    assert part["y"].layout is torch.jagged
    assert (type(part["w"]), part["w"].requires_grad) == (torch.Tensor, True)


def test_element_when_written_into_a_member_that_replaced_another_then_that_stays_what_it_is() -> None:
    store = Store(around([td(), td(other=torch.rand(2))], 0, 2))
    given = around([KINDS["parameter"](), td()], 0, 2)
    store.write(given[0], 0)
    one = TensorDict({"s": TensorDict({"x": torch.zeros(3), "y": torch.tensor(5.0)}, [])}, [])
    store.write(one, (0, 1))
    found = store.read(0)
    assert isinstance(found["y"], torch.nn.Parameter)
    assert found["y"][1] == 5
    store.write(TensorDict({"s": TensorDict({"z": torch.zeros(1)}, [])}, []), (0, 1))
    assert [list(row.keys()) for row in store.read(0).tensordicts] == [["x", "y"], ["z"]]


def test_members_when_elements_describe_them_then_no_notes() -> None:
    store = Store(around([td(), td(other=torch.rand(2))], 1, 1))
    assert not has_notes(store.write(around([td(more=torch.rand(2)), td(v="word")], 1, 1)))
    assert store.read().tensordicts[0]["more"].shape == (2,)


def test_stacks_of_rows_when_a_row_becomes_one_tensordict_then_comes_out_as_that() -> None:
    def rows() -> Any:
        return lazy_stack([TensorDict({"x": torch.rand(3)}), TensorDict({"z": torch.rand(1)})])

    store = Store(around([rows(), rows()], 0, 2))
    assert store.spec.find(("s",)).stack_dim is None  # type: ignore[union-attr]
    given = around([KINDS["jagged"](), rows()], 0, 2)
    store.write(given)
    assert_same(store.read(), given["s"])
    assert not has_notes(store.write(around([rows(), rows()], 0, 2)))


def test_lock_when_of_all_that_is_written_then_no_members_lock() -> None:
    given = around([KINDS["parameter"](), td(y=td().lock_())], 1, 1)
    for is_all in (True, False):
        store = Store(around([td(), td(other=torch.rand(2))], 1, 1))
        store.write(given.lock_() if is_all else given.unlock_())
        assert not any(member.is_locked for member in store.read().tensordicts)
        assert not store.read().tensordicts[1]["y"].is_locked
    given["s"].tensordicts[1].lock_()
    store.write(given)
    assert [member.is_locked for member in store.read().tensordicts] == [False, True]


def test_dense_tensordict_when_written_over_members_then_each_is_a_row_of_it() -> None:
    store = Store(around(members("parameter"), 1, 1))
    stack = TensorDict({"x": torch.rand(2, 2, 3)}, [2, 2])
    store.write(TensorDict({"s": stack}, [2]))
    assert_same(store.read(), LazyStackedTensorDict(*stack.unbind(1), stack_dim=1))


def test_fields_beside_an_instance_when_written_then_come_out() -> None:
    given = around([td(y=NonTensorStack("a", "a")), td()], 1, 1)["s"]
    wanted = capture(around(members("jagged"), 1, 1), is_exact=True).spec.find(("s",))
    assert isinstance(wanted, Node)
    _, elements = capture_packed(given, wanted)
    assert has_notes(elements)
    found = build(Spec(wanted._replace(members=())), {}, {(): [unpack(pack(element)) for element in elements]})
    assert_same(found, given)


def test_elements_when_there_are_none_then_other_members_are_refused_and_the_same_are_not() -> None:
    def empty(**entries: Any) -> Any:
        return around([TensorDict({"x": torch.rand(0), **entries}, [0]), TensorDict({"z": torch.rand(0)}, [0])], 1, 1)

    store = Store(empty())
    assert store.write(empty()) == []
    with pytest.raises(SpecMismatchError, match="store 'name', key 's'"):
        capture(empty(w=torch.nn.Parameter(torch.rand(0))), like=store.spec, is_exact=True, store="name")


def test_member_when_it_cannot_be_described_then_refused_by_name() -> None:
    parameter: Any = torch.nn.Parameter(nested(torch.jagged))
    given = around([td(y=parameter), td()], 1, 1)
    with pytest.raises(NotSupportedError, match=r"parameter or buffer at key \('s', 'y'\) of store 'name'"):
        capture(given, like=Store(around(members("jagged"), 1, 1)).spec, is_exact=True, store="name")


@pytest.mark.slow
@skip_old("shows no names of stacked parameters")
@settings(max_examples=120, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(given=trees_around_stacks())
def test_stack_when_of_any_members_that_replace_others_then_comes_out_as_it_was(given: Any) -> None:
    stack = (given.unlock_() if given.is_locked else given)["stack"]
    assume(len(stack.tensordicts) > 1)
    plain = [
        TensorDict({"x": torch.zeros(row.batch_size), f"x{number}": torch.zeros(row.batch_size)}, row.batch_size)
        for number, row in enumerate(stack.tensordicts)
    ]
    first: Any = LazyStackedTensorDict(*plain, stack_dim=stack.stack_dim)
    spec = capture(TensorDict({"stack": first}, given.batch_size), is_exact=True).spec
    captured = capture(TensorDict({"stack": stack}, given.batch_size), like=spec, is_exact=True)
    elements = flatten_elements(captured.values["stack",], given.dim())
    stored = nest_list([unpack(pack(element)) for element in elements], tuple(given.batch_size))
    assert_same(build(spec, {}, {("stack",): stored})["stack"], stack)


@pytest.mark.parametrize(("dim", "index"), [(0, 1), (0, slice(1, 3)), (1, (slice(None), 1)), (1, 2), (2, (1, 1))])
def test_write_when_rows_are_of_a_stack_of_instances_then_the_instances(dim: int, index: Any) -> None:
    def stack(start: float) -> Any:
        sizes = [3, 2, 2]
        inner = sizes[:dim] + sizes[dim + 1 :]
        members = [
            made(role=f"{start}", content="", tokens=torch.full((*inner, 1), start), batch_size=inner)
            for _ in range(sizes[dim])
        ]
        return TensorDict({"s": LazyStackedTensorDict(*members, stack_dim=dim)}, [3, 2])

    store = Store(stack(1.0))
    value = stack(2.0)[index]
    assert type(value["s"]) is Turns
    store.write(value, index)
    found = store.read()
    assert type(found) is LazyStackedTensorDict
    assert {type(member) for member in found.tensordicts} == {Turns}
    tokens = torch.ones(3, 2, 2, 1)
    tokens[index] = 2.0
    assert torch.stack([member.tokens for member in found.tensordicts], dim).equal(tokens)
