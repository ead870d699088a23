"""Stacks come back as they were, also if the elements by themselves do not show how."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from tensordict import LazyStackedTensorDict, NonTensorData, NonTensorStack, TensorDict, UnbatchedTensor, lazy_stack
from tensordict.nn import TensorDictParams

from tdserve.base.errors import NotSupportedError
from tdserve.structure.building.build import build
from tdserve.structure.building.gathering import gather
from tdserve.structure.building.packing import pack, unpack
from tdserve.structure.captures.capture import capture
from tdserve.structure.captures.captured import Captured
from tdserve.structure.trees import codec
from tdserve.structure.trees.nodes import Node
from tdserve.structure.trees.tree import Spec
from tests.sameness import assert_same, difference
from tests.tensordict_versions import skip_old
from tests.trees import trees_around_stacks

pytestmark = pytest.mark.filterwarnings("ignore:.*nested tensors.*prototype")

Unbatched: Any = UnbatchedTensor  # its constructor has no annotations


def td(**entries: Any) -> TensorDict:
    return TensorDict({"x": torch.rand(2, 3), **entries}, [2])


def nested(layout: torch.layout) -> torch.Tensor:
    return torch.nested.nested_tensor([torch.arange(1.0), torch.arange(2.0)], layout=layout)


KINDS: dict[str, Callable[[], Any]] = {
    "jagged": lambda: td(y=nested(torch.jagged)),
    "strided": lambda: td(y=nested(torch.strided)),
    "jagged that requires grad": lambda: td(y=nested(torch.jagged).requires_grad_()),
    "parameter": lambda: td(y=torch.nn.Parameter(torch.rand(2))),
    "frozen parameter": lambda: td(y=torch.nn.Parameter(torch.rand(2), requires_grad=False)),
    "buffer": lambda: td(y=torch.nn.Buffer(torch.rand(2), persistent=False)),
    "requires grad": lambda: td(y=torch.rand(2).requires_grad_()),
    "equal values": lambda: td(y=NonTensorStack("a", "a")),
    "one value": lambda: td(y=NonTensorData(data="a", batch_size=[2])),
    "locked": lambda: td().lock_(),
    "locked in part": lambda: td(y=td().lock_()),
    "lazy": lambda: lazy_stack([TensorDict({"y": torch.rand(1)}) for _ in range(2)]),
    "lazy in part": lambda: td(y=lazy_stack([TensorDict({"y": torch.rand(size)}) for size in (1, 2)])),
    "unlike rows": lambda: td(y=lazy_stack([TensorDict({"y": torch.rand(1)}), td().lock_()[0]])),
    "unlike columns": lambda: td(y=LazyStackedTensorDict(td(z=NonTensorStack("a", "a")), td(), stack_dim=1)),
    "params": lambda: TensorDictParams(td()),
    "params in part": lambda: td(y=TensorDictParams(td(), no_convert=True).eval()),
    "unbatched": lambda: td(y=Unbatched(torch.rand(3)), z=NonTensorStack("a", "a")),
    "nothing": lambda: TensorDict({}, [2]).lock_(),
}


def around(members: list[Any], dim: int, depth: int) -> TensorDict:
    """A tensordict around a stack."""
    stack: Any = LazyStackedTensorDict(*members, stack_dim=dim)
    return TensorDict({"s": stack}, stack.batch_size[:depth])


def there_and_back(given: Any, *, is_exact: bool = True) -> Any:
    """The result of building from its spec as it is sent, and from its elements as they are stored."""
    captured = capture(given, is_exact=is_exact)
    spec = codec.decode(codec.encode(captured.spec))
    assert spec == captured.spec
    values = dict(captured.values)
    for path in spec.packed:
        leaf = dict(spec.values)[path]
        values[path] = each(values[path], len(leaf.batch_size), lambda element: unpack(pack(element)))
    return build(spec, captured.tensors, values)


def each(elements: Any, depth: int, change: Callable[[Any], Any]) -> Any:
    return change(elements) if not depth else [each(element, depth - 1, change) for element in elements]


def stack_of(found: Captured) -> Node:
    node = found.spec.find(("s",))
    assert isinstance(node, Node)
    return node


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("dim", "depth"), [(1, 1), (1, 2), (0, 2)])
def test_member_when_of_any_kind_then_comes_back_as_it_was(kind: str, dim: int, depth: int) -> None:
    given = around([KINDS[kind](), td(other=torch.rand(2))], dim, depth)
    assert_same(there_and_back(given), given)


@pytest.mark.slow
@settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(given=trees_around_stacks())
def test_stack_when_of_any_members_then_comes_back_as_it_was(given: Any) -> None:
    assert_same(there_and_back(given), given)


def test_member_when_only_content_counts_then_plain_tensors_in_the_same_structure() -> None:
    given = around([KINDS["jagged"](), KINDS["parameter"](), KINDS["locked"](), KINDS["lazy"]()], 1, 1)
    found = there_and_back(given, is_exact=False)["s"].tensordicts
    assert found[0]["y"].layout is torch.jagged
    assert type(found[1]["y"]) is torch.Tensor
    assert not found[2].is_locked
    assert isinstance(found[3], LazyStackedTensorDict)


def test_members_when_elements_describe_them_then_are_not_noted() -> None:
    assert stack_of(capture(around([td(), td(y=torch.rand(2), v="word")], 1, 1), is_exact=True)).members == ()


@pytest.mark.parametrize(("shape", "dim", "depth"), [((0, 2), 1, 1), ((2, 0), 0, 2), ((0, 2, 2), 2, 2)])
def test_members_when_there_are_no_elements_then_come_back_with_their_keys(
    shape: tuple[int, ...], dim: int, depth: int
) -> None:
    inner = shape[:dim] + shape[dim + 1 :]
    members = [TensorDict({f"x{number}": torch.rand(*inner, number + 1)}, inner) for number in range(2)]
    given = around(members, dim, depth)
    assert_same(there_and_back(given), given)


@pytest.mark.parametrize("value", [NonTensorData(data="word", batch_size=[0]), Unbatched(torch.rand(2))])
def test_members_when_there_are_no_elements_then_a_value_for_all_of_them_is_refused(value: Any) -> None:
    members = [TensorDict({"a": torch.rand(0, 1)}, [0]), TensorDict({"b": value}, [0])]
    with pytest.raises(NotSupportedError, match="'s', 'b'"):
        capture(around(members, 1, 1))


def test_stack_when_nested_too_deep_with_its_members_then_refused_by_name() -> None:
    given: Any = td(y=nested(torch.jagged))
    for _ in range(25):
        given = TensorDict({"s": LazyStackedTensorDict(given, td(), stack_dim=1)[:, 0:2]}, [2])
    with pytest.raises(NotSupportedError, match="levels deep"):
        capture(given)


def members_of(node: Node) -> list[Spec]:
    return [Spec(member) for member in node.members]


def written(change: Callable[[list[Any]], Any]) -> Any:
    """Two members, one of them jagged, whose elements were changed since."""
    captured = capture(around([KINDS["jagged"](), td(z=NonTensorStack("a", "a"))], 1, 1))
    elements = list(captured.values["s",])
    change(elements)
    return build(captured.spec, {}, {("s",): elements})["s"]


def test_elements_when_written_anew_and_of_the_same_structure_then_members_as_they_were() -> None:
    first = TensorDict({"x": torch.rand(3), "y": torch.arange(5.0)})
    row = lazy_stack([first, TensorDict({"x": torch.rand(3), "z": "b"})])

    def write(elements: list[Any]) -> None:
        elements[0] = row

    found = written(write).tensordicts
    assert found[0]["y"].layout is torch.jagged
    assert found[0]["y"].unbind()[0].tolist() == [0, 1, 2, 3, 4]
    assert found[1].get("z").tolist() == ["b", "a"]


def test_elements_when_one_member_is_of_another_structure_then_only_that_is_another() -> None:
    row = lazy_stack([TensorDict({"x": torch.rand(3)}), TensorDict({"x": torch.rand(3), "z": "a"})])

    def write(elements: list[Any]) -> None:
        elements[0] = row

    found = written(write).tensordicts
    assert isinstance(found[0], LazyStackedTensorDict)
    assert isinstance(found[1].get("z"), NonTensorStack)


@pytest.mark.parametrize("row", [None, lazy_stack([TensorDict({"x": torch.rand(3)})])])
def test_elements_when_there_are_no_longer_as_many_members_then_each_for_itself(row: Any) -> None:
    def write(elements: list[Any]) -> None:
        elements[0] = row

    found = written(write)
    assert found.stack_dim == 0
    assert len(found.tensordicts) == 2


def test_values_when_one_for_all_has_become_several_then_all_come_back() -> None:
    captured = capture(around([td(v="word"), td(y=nested(torch.jagged))], 1, 1))
    elements = captured.values["s",]
    elements[1].entry.tensordicts[0].set("v", "other")
    assert build(captured.spec, {}, {("s",): elements})["s"].tensordicts[0].get("v").tolist() == ["word", "other"]


@skip_old("cannot slice a nested tensor along its rows")
def test_rows_when_taken_then_as_of_tensordict() -> None:
    captured = capture(around([KINDS["jagged"](), KINDS["equal values"](), KINDS["lazy in part"]()], 1, 1))
    given, elements = build(captured.spec, {}, dict(captured.values)), captured.values["s",]
    for rows in (slice(0, 1), slice(1, 2), slice(0, 2)):
        found = build(captured.spec.with_rows(rows.stop - rows.start), {}, {("s",): elements[rows]})
        assert_same(found["s"], given["s"][rows])


def test_components_when_they_differ_along_two_dimensions_then_as_if_nothing_was_noted() -> None:
    captured = capture(around([KINDS["jagged"](), td()], 1, 1))
    spec = captured.spec.with_batch(1, (1, 2), moved=(1,))
    found = build(spec, {}, {("s",): [captured.values["s",]]})["s"]
    assert (found.stack_dim, found.batch_size) == (2, torch.Size([1, 2, 2]))
    assert isinstance(found.tensordicts[0], LazyStackedTensorDict)


def test_gathered_when_an_element_was_never_written_then_nothing_is_known() -> None:
    node = stack_of(capture(around([KINDS["jagged"](), td()], 1, 1)))
    assert gather(members_of(node), [None, None], (2,), 1, (None,)) is None


def test_names_when_dimensions_have_them_then_so_do_stack_and_members() -> None:
    members = [td(y=NonTensorStack("a", "a")), td(other=torch.rand(2))]
    for member in members:
        member.names = ["time"]
    for dim in (0, 1):
        own = ["agent", "time"] if dim == 0 else ["time", "agent"]
        stack: Any = LazyStackedTensorDict(*members, stack_dim=dim, stack_dim_name="agent")
        for depth in (1, 2):
            given = TensorDict({"s": stack}, stack.batch_size[:depth], names=own[:depth])
            assert difference(there_and_back(given), given) is None
