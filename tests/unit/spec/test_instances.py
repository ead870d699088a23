"""Tensorclasses by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tensordict import TensorDict, TypedTensorDict, tensorclass
from tensordict.nn import TensorDictParams

from tdserve.errors import NotSupportedError
from tdserve.spec.instances import class_name, find_tensorclass, inside, instance_of, num_classes
from tests.unit.spec.ragged import Turns


class State(TypedTensorDict):
    """Typed."""

    x: torch.Tensor


class SubState(State):
    """Typed further."""

    y: torch.Tensor


def test_find_tensorclass_when_it_is_a_typed_tensordict_then_the_class() -> None:
    assert find_tensorclass(class_name(SubState), (), {"x", "y", "more"}) is SubState


def test_instance_of_when_typed_then_around_the_tensordict_itself() -> None:
    td = TensorDict({"x": torch.ones(2)}, [2])
    found = instance_of(State, td, {})
    assert type(found) is State
    assert inside(found) is td


def test_inside_when_it_is_a_wrapper_then_what_it_is_around() -> None:
    td = TensorDict({"x": torch.ones(2)}, [2])
    params = TensorDictParams(td)
    assert inside(params) is params._param_td
    assert inside(instance_of(Turns, td, {})) is td
    assert inside(1) is None


def test_find_tensorclass_when_it_is_known_then_the_class() -> None:
    assert find_tensorclass(class_name(Turns), (), {"role"}) is Turns


def test_find_tensorclass_when_a_field_is_unknown_then_names_it_and_the_key() -> None:
    with pytest.raises(NotSupportedError, match=r"at key 'h'.*no fields \['mood'\]"):
        find_tensorclass(class_name(Turns), ("h",), {"role", "mood"})


def test_find_tensorclass_when_class_is_unknown_then_says_which_module_to_import() -> None:
    with pytest.raises(NotSupportedError, match=r"import module a\.b first"):
        find_tensorclass("a.b.C", (), set())


def test_num_classes_when_one_is_used_for_the_first_time_then_grows() -> None:
    before = num_classes()

    @tensorclass
    class Fresh:
        x: torch.Tensor

    fresh: Any = Fresh
    fresh(x=torch.ones(1), batch_size=[1])
    assert num_classes() > before


def test_instance_of_when_made_then_it_holds_the_tensordict() -> None:
    td = TensorDict({"tokens": torch.ones(2, 1)}, [2])
    assert instance_of(Turns, td, {})._tensordict is td
