"""Tensorclasses by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tensordict import LazyStackedTensorDict, TensorDict, TypedTensorDict, lazy_stack, tensorclass
from tensordict.nn import TensorDictParams

from tdserve.base.errors import NotSupportedError
from tdserve.structure.tensordicts.instances import (
    count_classes,
    find_content,
    find_fields,
    find_tensorclass,
    get_class_name,
    make_instance,
    to_inner_stack,
    to_stack,
)
from tests.ragged import Turns, made
from tests.sameness import assert_same


class State(TypedTensorDict):
    """Typed."""

    x: torch.Tensor


class SubState(State):
    """Typed further."""

    y: torch.Tensor


def test_find_tensorclass_when_it_is_a_typed_tensordict_then_the_class() -> None:
    assert find_tensorclass(get_class_name(SubState), (), {"x", "y", "more"}) is SubState


def test_instance_of_when_typed_then_around_the_tensordict_itself() -> None:
    td = TensorDict({"x": torch.ones(2)}, [2])
    found = make_instance(State, td, {})
    assert type(found) is State
    assert find_content(found) is td


def test_inside_when_it_is_a_wrapper_then_what_it_is_around() -> None:
    td = TensorDict({"x": torch.ones(2)}, [2])
    params = TensorDictParams(td)
    assert find_content(params) is params._param_td
    assert find_content(make_instance(Turns, td, {})) is td
    assert find_content(1) is None


def test_find_tensorclass_when_it_is_known_then_the_class() -> None:
    assert find_tensorclass(get_class_name(Turns), (), {"role"}) is Turns


def test_find_tensorclass_when_a_field_is_unknown_then_names_it_and_the_key() -> None:
    with pytest.raises(NotSupportedError, match=r"at key 'h'.*no fields \['mood'\]"):
        find_tensorclass(get_class_name(Turns), ("h",), {"role", "mood"})


def test_find_tensorclass_when_class_is_unknown_then_the_error_names_the_module_to_import() -> None:
    with pytest.raises(NotSupportedError, match=r"import module a\.b first"):
        find_tensorclass("a.b.C", (), set())


def test_num_classes_when_one_is_used_for_the_first_time_then_grows() -> None:
    before = count_classes()

    @tensorclass
    class Fresh:
        x: torch.Tensor

    fresh: Any = Fresh
    fresh(x=torch.ones(1), batch_size=[1])
    assert count_classes() > before


def test_instance_of_when_made_then_it_holds_the_tensordict() -> None:
    td = TensorDict({"tokens": torch.ones(2, 1)}, [2])
    assert make_instance(Turns, td, {})._tensordict is td


def members() -> list[Any]:
    """Instances of different sizes, one of which lacks a field."""
    return [
        made(role="user", content="a", tokens=torch.ones(2, 1), batch_size=[2]),
        made(role="tool", content="b", batch_size=[2]),
    ]


@pytest.mark.parametrize("dim", [0, 1])
def test_as_stack_when_around_a_lazy_stack_then_a_stack_of_instances_and_back(dim: int) -> None:
    instance = lazy_stack(members(), dim)
    stack = LazyStackedTensorDict(*members(), stack_dim=dim, stack_dim_name="time")
    found = to_stack(instance)
    assert type(found) is LazyStackedTensorDict
    assert [type(member) for member in found.tensordicts] == [Turns, Turns]
    assert found.stack_dim == dim
    content, is_instance = to_inner_stack(stack, get_class_name(Turns))
    assert is_instance
    assert content.names[dim] == "time"
    for mine, theirs in zip(content.tensordicts, instance._tensordict.tensordicts, strict=True):
        assert_same(mine, theirs)


def test_as_stack_when_dense_then_the_instance_itself() -> None:
    (instance, _) = members()
    assert to_stack(instance) is instance


def test_as_instance_when_some_members_are_of_no_such_class_then_the_stack_itself() -> None:
    for others in ([*members(), TensorDict({}, [2])], [State(x=torch.ones(2), batch_size=[2])]):
        stack = LazyStackedTensorDict(*others, stack_dim=0)
        assert to_inner_stack(stack, get_class_name(Turns)) == (stack, False)


def test_fields_of_when_a_class_is_known_then_its_fields_and_none_of_a_typed_tensordict() -> None:
    assert find_fields(get_class_name(Turns)) == {"role", "content", "tool_calls", "tokens"}
    assert find_fields(get_class_name(State)) == frozenset()
    with pytest.raises(NotSupportedError, match="import module nowhere"):
        find_fields("nowhere.Class")
