from __future__ import annotations

import operator
from typing import Any

import pytest
from tensordict import TensorDictBase

from tdserve.client.handles.tensordict_calls import TensorDictCalls


class Named(TensorDictCalls):
    """Returns the name of the special method that was performed."""

    def _perform(self, name: str, *args: Any, **_: Any) -> Any:
        return (name, *args)

    def _rewrite(self, name: str, *args: Any, **_: Any) -> Any:
        return (name, "in place", *args)


BINARY = ["add", "sub", "mul", "truediv", "mod", "pow", "and", "or", "xor", "eq", "ne", "lt", "le", "gt", "ge"]


@pytest.mark.parametrize("name", BINARY)
def test_operator_when_applied_then_the_method_of_that_name(name: str) -> None:
    apply = getattr(operator, f"{name}_" if name in ("and", "or") else name)
    assert apply(Named(), 3) == (f"__{name}__", 3)
    if hasattr(TensorDictBase, f"__r{name}__"):
        assert apply(3, Named()) == (f"__r{name}__", 3)


@pytest.mark.parametrize("name", ["abs", "neg", "invert"])
def test_operator_when_of_one_then_the_method_of_that_name(name: str) -> None:
    assert getattr(operator, name)(Named()) == (f"__{name}__",)


@pytest.mark.parametrize("name", ["add", "sub", "mul", "truediv", "pow"])
def test_operator_when_in_place_then_the_method_with_an_underscore(name: str) -> None:
    named = {"truediv": "div"}.get(name, name)
    assert getattr(operator, f"i{name}")(Named(), 3) == (f"{named}_", "in place", 3)


def test_operators_when_tensordict_has_one_then_so_have_these() -> None:
    known = [*BINARY, *(f"r{name}" for name in BINARY), *(f"i{name}" for name in BINARY), "abs", "neg", "invert"]
    theirs = [f"__{name}__" for name in known if hasattr(TensorDictBase, f"__{name}__")]
    assert len(theirs) > 30
    assert [name for name in theirs if getattr(TensorDictCalls, name, None) is None] == []


def test_operators_when_hashed_then_by_identity() -> None:
    assert len({Named(), Named()}) == 2
