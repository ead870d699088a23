from __future__ import annotations

from typing import Any

import pytest
import torch
from tensordict import TensorDict, lazy_stack

from tdserve.structure.captures.capture import capture
from tdserve.structure.trees.difference import Difference, describe_difference, find_difference
from tdserve.structure.trees.nodes import Node


def root_of(td: Any) -> Node:
    """Returns the structure of a tensordict."""
    return capture(td).spec.root


def td(**changes: Any) -> TensorDict:
    """A structure with nested and non-tensor entries."""
    nested = TensorDict({"y": torch.zeros(2, 3)}, [2])
    leaves = {"x": torch.zeros(2, 4), "n": nested, "text": "a", **changes}
    return TensorDict({key: value for key, value in leaves.items() if value is not None}, [2])


jagged = torch.nested.nested_tensor([torch.zeros(1), torch.zeros(2)], layout=torch.jagged)

CASES: dict[str, tuple[Any, Any, Difference]] = {
    "shape": (td(), td(x=torch.zeros(2, 5)), Difference("x", "float32[2, 4]", "float32[2, 5]")),
    "nested dtype": (
        td(),
        td(n=TensorDict({"y": torch.zeros(2, 3, dtype=torch.int8)}, [2])),
        Difference("('n', 'y')", "float32[2, 3]", "int8[2, 3]"),
    ),
    "a key that is missing": (td(), td(x=None), Difference("x", "float32[2, 4]", "no such key")),
    "a key more": (td(x=None), td(), Difference("x", "no such key", "float32[2, 4]")),
    "sizes that are free": (
        td(x=jagged),
        td(x=torch.zeros(2, 2)),
        Difference("x", "ragged float32[2, -1]", "float32[2, 2]"),
    ),
    "names": (td(), td().refine_names("time"), Difference("", "names=None", "names=('time',)")),
    "device": (td(), td().to("cpu"), Difference("", "device=None", "device=cpu")),
    "lazy": (
        TensorDict({"n": TensorDict({"y": torch.zeros(2)}, [2])}, [2]),
        TensorDict({"n": lazy_stack([TensorDict({"y": torch.zeros(())}, []) for _ in range(2)])}, [2]),
        Difference("n", "stack_dim=None", "stack_dim=0"),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_difference_when_two_structures_differ_then_names_the_first_key(name: str) -> None:
    one, other, found = CASES[name]
    assert find_difference(root_of(one), root_of(other)) == found
    turned = Difference(found.key, found.other, found.one)
    assert find_difference(root_of(other), root_of(one)) == turned
    assert f"it has {found.one}, asked is {found.other}" in describe_difference(root_of(one), root_of(other))


def test_difference_when_only_the_order_of_keys_differs_then_none() -> None:
    assert find_difference(root_of(td()), root_of(td(x=None).set("x", torch.zeros(2, 4)))) is None
